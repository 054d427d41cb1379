"""The fused CPU engine: one pass over the sources per token, forward and backward, for any number of sources.

Kernels in numba (the optional extra `fast`), compiled at first use for the dtype at hand and cached on disk. They take
addresses, so that a tuple of tensors needs neither a stack nor a kernel of its own length. Rows are cut into chunks of
a fixed size: sums over tokens do not depend on the number of threads.

Same arguments and results as the functions of `ops/eager.py`, for one head.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, prange, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

ROWS = 64  # tokens per chunk
MATH = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and infinity keep their meaning
# how a kernel sees the elements of a tensor: numba has neither half type, so the bits travel as integers
MARKERS = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}
_pid = os.getpid()


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), codegen


@intrinsic
def _widen(_: Any, x: Any) -> Any:
    """An element to a float that can be computed with."""
    if isinstance(x, types.Float):
        return x(x), lambda context, builder, signature, args: args[0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(x), codegen


@intrinsic
def _narrow(_: Any, x: Any, marker: Any) -> Any:
    """A float to an element, rounded to nearest even."""
    out = marker.dtype
    if isinstance(out, types.Float):
        return out(x, marker), lambda context, builder, signature, args: context.cast(builder, args[0], x, out)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, short = ir.IntType(32), ir.IntType(16)
        if out == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), short)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        quiet = builder.or_(bits, ir.Constant(word, 0x400000))  # rounding must not carry a NaN into infinity
        rounded = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), short)

    return out(types.float32, marker), codegen


def _square(element: Any, wide: Any, source: Any, out_at: int, M: int, D: int, eps: float) -> None:
    out = carray(_pointer(out_at), (M,), wide.dtype)
    rows = carray(_pointer(source[0]), (M, source[1]), element.dtype)
    zero, one = wide.dtype.type(0), wide.dtype.type(1)  # a plain 1 would make doubles of floats
    for chunk in prange((M + ROWS - 1) // ROWS):
        for m in range(chunk * ROWS, min(M, chunk * ROWS + ROWS)):
            row, total = rows[m], zero
            for j in range(D):
                total += _widen(row[j]) * _widen(row[j])
            out[m] = one / np.sqrt(total / wide.dtype.type(D) + wide.dtype.type(eps))


def _forward(
    element: Any, wide: Any, out_element: Any, sources: Any, rstd: Any, queries_at: int, outs: Any, carry: Any,
    top_at: int, denom_at: int, dots_at: int, M: int, D: int, normalise: bool,
) -> None:  # fmt: skip
    zero, one = wide.dtype.type(0), wide.dtype.type(1)
    S, Q = len(sources), len(outs)
    queries = carray(_pointer(queries_at), (Q, D), wide.dtype)
    tops = carray(_pointer(top_at), (Q, M), wide.dtype)
    denoms = carray(_pointer(denom_at), (Q, M), wide.dtype)
    dots = carray(_pointer(dots_at), (S, Q, M), wide.dtype)
    for chunk in prange((M + ROWS - 1) // ROWS):
        total, weights = np.empty(D, wide.dtype), np.empty(S, wide.dtype)
        for m in range(chunk * ROWS, min(M, chunk * ROWS + ROWS)):
            for k in range(S):
                row = carray(_pointer(sources[k, 0]), (M, sources[k, 1]), element.dtype)[m]
                for q in range(Q):
                    query, dot = queries[q], zero
                    for j in range(D):
                        dot += _widen(row[j]) * query[j]
                    dots[k, q, m] = dot
            for q in range(Q):
                for k in range(S):
                    weights[k] = dots[k, q, m]
                    if len(rstd):
                        weights[k] *= carray(_pointer(rstd[k]), (M,), wide.dtype)[m]
                top = weights[0] if S else zero
                for k in range(1, S):
                    top = max(top, weights[k])
                denom, share = zero, one
                if len(carry):
                    old = carray(_pointer(carry[1]), (M,), wide.dtype)[m]
                    top = max(top, old) if S else old
                    share = np.exp(old - top)
                    denom = share * carray(_pointer(carry[2]), (M,), wide.dtype)[m]
                for k in range(S):
                    weights[k] = np.exp(weights[k] - top)
                    denom += weights[k]
                tops[q, m], denoms[q, m] = top, denom
                scale = one / denom if normalise else one
                if len(carry):
                    before = carray(_pointer(carry[0]), (M, D), wide.dtype)[m]
                    for j in range(D):
                        total[j] = share * scale * before[j]
                else:
                    total[:] = 0
                for k in range(S):
                    row = carray(_pointer(sources[k, 0]), (M, sources[k, 1]), element.dtype)[m]
                    weight = weights[k] * scale
                    for j in range(D):
                        total[j] += weight * _widen(row[j])
                out = carray(_pointer(outs[q]), (M, D), out_element.dtype)[m]
                for j in range(D):
                    out[j] = _narrow(total[j], out_element)


def _backward(
    element: Any, wide: Any, grad_element: Any, sources: Any, rstd: Any, queries_at: int, grads: Any, outs: Any,
    top_at: int, denom_at: int, dots_at: int, grad_denom_at: int, merged: Any, grad_queries_at: int, M: int, D: int,
) -> None:  # fmt: skip
    zero, one = wide.dtype.type(0), wide.dtype.type(1)
    S, Q = len(sources), len(grads)
    queries = carray(_pointer(queries_at), (Q, D), wide.dtype)
    tops = carray(_pointer(top_at), (Q, M), wide.dtype)
    denoms = carray(_pointer(denom_at), (Q, M), wide.dtype)
    grad_denoms = carray(_pointer(grad_denom_at), (Q, M), wide.dtype)
    dots = carray(_pointer(dots_at), (S, Q, M), wide.dtype)
    chunks = (M + ROWS - 1) // ROWS
    grad_queries = carray(_pointer(grad_queries_at), (chunks, Q, D), wide.dtype)
    for chunk in prange(chunks):
        total = np.empty(D, wide.dtype)
        weights, grad_logits = np.empty((Q, S), wide.dtype), np.empty((Q, S), wide.dtype)
        grad_query = grad_queries[chunk]
        for m in range(chunk * ROWS, min(M, chunk * ROWS + ROWS)):
            for k in range(S):
                row = carray(_pointer(sources[k, 0]), (M, sources[k, 1]), element.dtype)[m]
                inverse = carray(_pointer(rstd[k]), (M,), wide.dtype)[m] if len(rstd) else one
                for q in range(Q):
                    grad, dot = carray(_pointer(grads[q]), (M, D), grad_element.dtype)[m], zero
                    for j in range(D):
                        dot += _widen(row[j]) * _widen(grad[j])
                    weights[q, k] = np.exp(dots[k, q, m] * inverse - tops[q, m])
                    if not grad_denom_at:
                        weights[q, k] /= denoms[q, m]
                    grad_logits[q, k] = dot
            for q in range(Q):
                delta = zero  # what the gradient of a weight is measured against
                if len(merged):
                    grad = carray(_pointer(grads[0]), (M, D), grad_element.dtype)[m]
                    out = carray(_pointer(merged[0]), (M, D), element.dtype)[m]
                    share = np.exp(carray(_pointer(merged[1]), (M,), wide.dtype)[m] - tops[0, m]) / denoms[0, m]
                    before = carray(_pointer(merged[2]), (M, D), wide.dtype)[m]
                    for j in range(D):
                        delta += _widen(grad[j]) * _widen(out[j])
                        before[j] = share * _widen(grad[j])
                    carray(_pointer(merged[3]), (M,), wide.dtype)[m] = -share * delta
                elif grad_denom_at:
                    delta = -grad_denoms[q, m]
                else:
                    for k in range(S):
                        delta += weights[q, k] * grad_logits[q, k]
                for k in range(S):
                    grad_logits[q, k] = weights[q, k] * (grad_logits[q, k] - delta)
            for k in range(S):
                row = carray(_pointer(sources[k, 0]), (M, sources[k, 1]), element.dtype)[m]
                inverse, own = one, zero
                if len(rstd):  # d logit / d source = inverse query - source dot inverse^3 / D
                    inverse = carray(_pointer(rstd[k]), (M,), wide.dtype)[m]
                    for q in range(Q):
                        own -= grad_logits[q, k] * dots[k, q, m]
                    own *= inverse * inverse * inverse / wide.dtype.type(D)
                for j in range(D):
                    total[j] = own * _widen(row[j])
                for q in range(Q):
                    grad = carray(_pointer(grads[q]), (M, D), grad_element.dtype)[m]
                    query, sums, weight, slope = queries[q], grad_query[q], weights[q, k], grad_logits[q, k] * inverse
                    for j in range(D):
                        total[j] += weight * _widen(grad[j]) + slope * query[j]
                        sums[j] += slope * _widen(row[j])
                if outs[k]:
                    out = carray(_pointer(outs[k]), (M, D), element.dtype)[m]
                    for j in range(D):
                        out[j] = _narrow(total[j], element)


_serial = {kernel: njit(fastmath=MATH, cache=True)(kernel) for kernel in (_square, _forward, _backward)}
_parallel = {kernel: njit(fastmath=MATH, parallel=True, cache=True)(kernel) for kernel in _serial}


def _run(kernel: Any, num_rows: int, *args: Any) -> None:
    (_serial if runs_serially(num_rows) else _parallel)[kernel](*args)


def runs_serially(num_rows: int) -> bool:
    """Whether a kernel runs on one thread: so few rows, torch has one, or after a fork, which OpenMP does not survive.

    Otherwise numba is told to run on as many as torch.
    """
    if num_rows <= ROWS:
        return True
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    if threads == 1 or os.getpid() != _pid:
        return True
    set_num_threads(threads)
    return False


def _addresses(tensors: Sequence[Tensor | None]) -> np.ndarray:
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], np.int64)


def _rows(sources: Sequence[Tensor], D: int) -> tuple[np.ndarray, list[Tensor]]:
    """Address and row stride of every source, and the tensors that must stay alive meanwhile."""
    flat = [source.reshape(-1, D) for source in sources]
    flat = [rows if rows.stride(1) == 1 else rows.contiguous() for rows in flat]
    return np.array([(rows.data_ptr(), rows.stride(0)) for rows in flat], np.int64).reshape(-1, 2), flat


def reciprocal_rms(source: Tensor, eps: float) -> Tensor:
    """See `ops/eager.py`."""
    D, wide = source.shape[-1], torch.promote_types(source.dtype, torch.float32)
    out = source.new_empty(source.shape[:-1], dtype=wide)
    (address,), _alive = _rows([source], D)
    _run(_square, out.numel(), MARKERS[source.dtype], MARKERS[wide], address, out.data_ptr(), out.numel(), D, eps)
    return out


def forward(
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    queries: Tensor,
    carry: Sequence[Tensor],
    dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """See `ops/eager.py`."""
    like, D = (*sources, *carry)[0], queries.shape[1] * queries.shape[2]
    M, Q, wide = like.numel() // D, len(queries), queries.dtype
    element, out_dtype = sources[0].dtype if sources else wide, dtype or wide
    outs = [like.new_empty(like.shape, dtype=out_dtype) for _ in range(Q)]
    top, denom = queries.new_empty(2, Q, M, 1).unbind()
    dots = queries.new_empty(len(sources), Q, M, 1)
    rows, _alive = _rows(sources, D)
    _run(
        _forward, M, MARKERS[element], MARKERS[wide], MARKERS[out_dtype], rows, _addresses(rstd), queries.data_ptr(),
        _addresses(outs), _addresses(carry), top.data_ptr(), denom.data_ptr(), dots.data_ptr(), M, D, dtype is not None,
    )  # fmt: skip
    return outs, top, denom, dots


def backward(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], queries: Tensor, top: Tensor, denom: Tensor, dots: Tensor,
    grads: Sequence[Tensor], grad_denom: Tensor | None, merged: Sequence[Tensor], needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], Sequence[Tensor]]:  # fmt: skip
    """See `ops/eager.py`."""
    D, M, wide = queries.shape[1] * queries.shape[2], dots.shape[2], queries.dtype
    grads = [grad.contiguous() for grad in grads]
    outs = [source.new_empty(source.shape) if need else None for source, need in zip(sources, needed, strict=True)]
    grad_carry = [torch.empty_like(tensor, dtype=wide) for tensor in merged]
    grad_queries = queries.new_zeros(-(-M // ROWS), *queries.shape)
    rows, _alive = _rows(sources, D)
    _run(
        _backward, M, MARKERS[(*merged, *sources)[0].dtype], MARKERS[wide], MARKERS[grads[0].dtype], rows,
        _addresses(rstd), queries.data_ptr(), _addresses(grads), _addresses(outs), top.data_ptr(), denom.data_ptr(),
        dots.data_ptr(), 0 if grad_denom is None else grad_denom.data_ptr(), _addresses([*merged, *grad_carry]),
        grad_queries.data_ptr(), M, D,
    )  # fmt: skip
    return grad_queries.sum(0), outs, grad_carry
