"""The fused CPU read of inference: nothing is kept for a backward, so a read is one kernel and one allocation.

When a token is decoded a read moves a few kilobytes, and what costs is calls. So the kernel does all of it, the norm of
the keys and the product of query and gain included, in numba (the optional extra `fast`), as `ops/cpu_kernels.py` does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, prange
from torch import Tensor

from attnres_lit.ops.cpu_kernels import MARKERS, MATH, ROWS, _narrow, _pointer, _widen, runs_serially
from attnres_lit.ops.eager import compute_dtype


def _read(
    element: Any, wide: Any, sources: Any, query_at: int, gain_at: int, out_at: int, M: int, D: int, eps: float
) -> None:
    zero, S = wide.dtype.type(0), len(sources)
    raw = carray(_pointer(query_at), (D,), wide.dtype)
    out = carray(_pointer(out_at), (M, D), element.dtype)
    query = np.empty(D, wide.dtype)
    query[:] = raw
    if gain_at:
        gain = carray(_pointer(gain_at), (D,), wide.dtype)
        for j in range(D):
            query[j] *= gain[j]
    for chunk in prange((M + ROWS - 1) // ROWS):
        total, weights = np.empty(D, wide.dtype), np.empty(S, wide.dtype)
        for m in range(chunk * ROWS, min(M, chunk * ROWS + ROWS)):
            top = wide.dtype.type(-np.inf)
            for k in range(S):
                row, dot, square = carray(_pointer(sources[k]), (M, D), element.dtype)[m], zero, zero
                for j in range(D):
                    value = _widen(row[j])
                    dot += value * query[j]
                    square += value * value
                if eps >= 0:
                    dot /= np.sqrt(square / wide.dtype.type(D) + wide.dtype.type(eps))
                weights[k] = dot
                top = max(top, dot)
            denom = zero
            for k in range(S):
                weights[k] = np.exp(weights[k] - top)
                denom += weights[k]
            total[:] = 0
            for k in range(S):
                row, weight = carray(_pointer(sources[k]), (M, D), element.dtype)[m], weights[k] / denom
                for j in range(D):
                    total[j] += weight * _widen(row[j])
            for j in range(D):
                out[m, j] = _narrow(total[j], element)


_serial = njit(fastmath=MATH, cache=True)(_read)
_parallel = njit(fastmath=MATH, parallel=True, cache=True)(_read)


def fits(sources: Sequence[Tensor], query: Tensor) -> bool:
    """Whether the kernel takes these: plain tensors on the CPU, alike and without gaps."""
    first = sources[0]
    shape, dtype = first.shape, first.dtype
    for source in sources:
        if source.dtype is not dtype or not source.is_cpu or not source.is_contiguous() or source.shape != shape:
            return False
    return shape[-1] == query.numel() and query.is_cpu and type(first) is Tensor


def read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float | None) -> Tensor:
    """Depth attention with one head.

    Args:
        sources: S tensors `(..., D)` that fit.
        query: `(D,)`.
        key_gain: `(D,)`, or None.
        eps: of the norm on keys; None: they are not normalised.

    Returns:
        `(..., D)` in the dtype of the sources, without gradient.
    """
    out = torch.empty_like(sources[0])
    D, wide = query.numel(), compute_dtype(out)
    query = _plain(query, wide)  # alive while its address is in use, as is the gain
    gain = None if key_gain is None else _plain(key_gain, wide)
    M = out.numel() // D
    (_serial if runs_serially(M) else _parallel)(
        MARKERS[out.dtype], MARKERS[wide], np.array([source.data_ptr() for source in sources]), query.data_ptr(),
        0 if gain is None else gain.data_ptr(), out.data_ptr(), M, D, -1.0 if eps is None else eps,
    )  # fmt: skip
    return out


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype and without gaps; nearly always it is so already, and asking is cheaper than converting."""
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
