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

# by dtype of the sources: how a kernel sees their elements, and what it computes in, also as a dtype
KINDS = {
    dtype: (marker, MARKERS[wide], wide)
    for dtype, marker in MARKERS.items()
    for wide in [compute_dtype(torch.empty(0, dtype=dtype))]
}


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


def read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float | None) -> Tensor | None:
    """Depth attention with one head, where the kernel takes the sources: plain, on the CPU, alike and without gaps.

    Python is kept short: decoding streams all weights through the caches, so what runs between them starts cold.

    Args:
        sources: S tensors `(..., D)`.
        query: `(D,)`.
        key_gain: `(D,)`, or None.
        eps: of the norm on keys; None: they are not normalised.

    Returns:
        `(..., D)` in the dtype of the sources, without gradient; None where the kernel does not take them.
    """
    first = sources[0]
    shape, dtype, D = first.shape, first.dtype, query.numel()
    if type(first) is not Tensor or dtype not in KINDS or shape[-1] != D or not query.is_cpu:
        return None
    addresses = []
    for source in sources:
        if source.dtype is not dtype or source.shape != shape or not source.is_cpu or not source.is_contiguous():
            return None
        addresses.append(source.data_ptr())
    element, wide, wide_dtype = KINDS[dtype]
    query = _plain(query, wide_dtype)  # alive while its address is in use, as is the gain
    gain = None if key_gain is None else _plain(key_gain, wide_dtype)
    out = torch.empty_like(first)
    M = first.numel() // D
    kernel = _serial if M <= ROWS or runs_serially(M) else _parallel
    kernel(
        element, wide, np.array(addresses), query.data_ptr(), 0 if gain is None else gain.data_ptr(), out.data_ptr(),
        M, D, -1.0 if eps is None else eps,
    )  # fmt: skip
    return out


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype and without gaps; nearly always it is so already, and asking is cheaper than converting."""
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
