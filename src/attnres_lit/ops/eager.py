"""The eager engine of depth attention: tensor operations on any device, without a stack or a copy of the sources.

Formulas without autograd; `ops/attend.py` makes them differentiable. S sources, Q queries, H heads, M tokens. "Wide"
is at least fp32, see `compute_dtype`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of logits, softmax and sums: at least fp32, float64 stays float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """A context without autocast; free where there is none, which counts when a single token is decoded."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def reciprocal_rms(source: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(source^2) + eps)`: `(..., D)` to `(...)`, wide."""
    wide = source.to(compute_dtype(source))
    return (torch.linalg.vecdot(wide, wide) / source.shape[-1]).add_(eps).rsqrt_()


def forward(
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    queries: Tensor,
    carry: Sequence[Tensor],
    dtype: torch.dtype | None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Softmax of every query over the sources, on top of what `carry` has summed before.

    Args:
        sources: S tensors `(..., D)`; may be empty if there is a carry.
        rstd: their reciprocal RMS `(...)`, wide; empty if the keys are not normalised.
        queries: `(Q, H, D/H)`, wide.
        carry: empty, or `(out, top, denom)` of an earlier call without `dtype`, for a single query.
        dtype: of the normalised result; None leaves `out` as the wide sum of `exp(logit - top) source`.

    Returns:
        Q outs `(..., D)`; the largest logit `top` and the sum `denom` of `exp(logit - top)`, both `(Q, M, H)`; `dots`
        `(S, Q, M, H)`, the products of queries and keys before the norm.
    """
    shape, wide, heads = (*sources, *carry)[0].shape, queries.dtype, queries.shape[1]
    rows = [_by_head(source, heads) for source in sources]
    dots = queries.new_empty(0, len(queries), shape[:-1].numel(), heads)
    if rows:
        dots = torch.stack([torch.einsum("mhd,qhd->qmh", row.to(wide), queries) for row in rows])
    logits, times = _logits(dots, rstd), None
    if carry:  # one more row, which counts `times`
        old, times = (scalars.view(1, 1, -1, heads) for scalars in carry[1:])
        rows, logits = [_by_head(carry[0], heads), *rows], torch.cat((old, logits))
    top = logits.amax(0)
    weights = (logits - top).exp()  # (S or S + 1, Q, M, H)
    denom = weights.sum(0) if times is None else weights[1:].sum(0) + weights[0] * times[0]
    if dtype is not None:
        weights = weights / denom
    outs = []
    for q in range(len(queries)):
        out = rows[0] * weights[0, q].unsqueeze(-1)
        for row, weight in zip(rows[1:], weights[1:, q], strict=True):
            out.addcmul_(row.to(wide), weight.unsqueeze(-1))
        outs.append(out.view(shape).to(dtype or wide))
    return outs, top, denom, dots


def backward(
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    queries: Tensor,
    top: Tensor,
    denom: Tensor,
    dots: Tensor,
    grads: Sequence[Tensor],
    grad_denom: Tensor | None,
    merged: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], Sequence[Tensor]]:
    """Gradients of queries, sources and carry.

    Args:
        sources, rstd, queries, top, denom, dots: as in and from `forward`.
        grads: of the Q outs.
        grad_denom: `(Q, M, H)`, of `denom`; None if the result was normalised.
        merged: empty, or, if there was a carry, the result and the `top` of the carry.
        needed: whether the gradient of each source is wanted.

    Returns:
        `(Q, H, D/H)`; a gradient or None for each source; empty, or the gradients of `out` and `denom` of the carry.
    """
    wide, heads = queries.dtype, queries.shape[1]
    rows = [_by_head(source, heads) for source in sources]
    by_head = [_by_head(grad, heads).to(wide) for grad in grads]  # Q of (M, H, D/H)
    weights = (_logits(dots, rstd) - top).exp()  # (S, Q, M, H)
    if grad_denom is None:
        weights = weights / denom
    grad_weights = dots  # empty
    if rows:
        products = [torch.linalg.vecdot(grad, row.to(wide)) for row in rows for grad in by_head]
        grad_weights = torch.stack(products).view_as(dots)
    grad_carry = ()
    if merged:
        out, old = merged
        share = (old.view_as(top) - top).exp() / denom
        delta = torch.linalg.vecdot(by_head[0], _by_head(out, heads).to(wide)).unsqueeze(0)  # (1, M, H)
        grad_carry = ((by_head[0] * share[0].unsqueeze(-1)).view(out.shape), (-share * delta).view(old.shape))
    else:
        delta = (weights * grad_weights).sum(0) if grad_denom is None else -grad_denom
    grad_logits = weights * (grad_weights - delta)  # delta: what the gradient of a weight is measured against
    grad_queries, grad_sources = torch.zeros_like(queries), []
    for k, source in enumerate(sources):
        row, slope, own = rows[k].to(wide), grad_logits[k], None  # (M, H, D/H), (Q, M, H)
        if rstd:  # d logit / d source = inverse query - source dot inverse^3 / D
            inverse = rstd[k].reshape(1, -1, 1)
            own = (slope * dots[k]).sum((0, 2)).unsqueeze(-1) * inverse[0].pow(3) / -source.shape[-1]  # (M, 1)
            slope = slope * inverse
        grad_queries += torch.einsum("qmh,mhd->qhd", slope, row)
        if not needed[k]:
            grad_sources.append(None)
            continue
        total = by_head[0] * weights[k, 0].unsqueeze(-1)
        for q in range(len(queries)):
            if q:
                total.addcmul_(by_head[q], weights[k, q].unsqueeze(-1))
            total.addcmul_(slope[q].unsqueeze(-1), queries[q])
        if own is not None:
            total.addcmul_(row, own.unsqueeze(-1))
        grad_sources.append(total.view(source.shape).to(source.dtype))
    return grad_queries, grad_sources, grad_carry


def _by_head(source: Tensor, heads: int) -> Tensor:
    """`(..., D)` to `(M, H, D/H)`, a view where the strides allow it."""
    return source.reshape(-1, heads, source.shape[-1] // heads)


def _logits(dots: Tensor, rstd: Sequence[Tensor]) -> Tensor:
    return dots * torch.stack(tuple(rstd)).view(len(rstd), 1, -1, 1) if rstd else dots
