"""Depth attention: a softmax over the sources at one token position (arXiv 2603.15031, Eq. 2-4).

    logit_s = query . (key_gain * RMSNorm(source_s))      weights = softmax_s(logit)      out = sum_s weights_s source_s

There is no 1/sqrt(D), no temperature and no bias; keys are normalised, values are the raw sources. `H` heads split D
after the norm: each slice of D has its own softmax.

Shapes: S sources, D width, H heads, `...` any leading axes (batch, tokens).
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BACKENDS = ("auto", "eager")
Backend = Literal["auto", "eager"]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of logits, softmax and sums: at least fp32, float64 stays float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def depth_attention_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The formula, word for word: stack, normalise, softmax, sum. `depth_attention` is compared with this.

    Arguments, result and errors are those of `depth_attention`; here the weights carry a gradient too.
    """
    check_sources(sources, query, key_gain)
    heads = query.shape[0] if query.dim() == 2 else 1
    dtype = compute_dtype(sources[0])
    values = torch.stack(tuple(sources)).to(dtype)  # (S, ..., D)
    keys = values
    if eps is not None:
        keys = keys * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    if key_gain is not None:
        keys = keys * key_gain.to(dtype)
    keys, by_head = keys.unflatten(-1, (heads, -1)), values.unflatten(-1, (heads, -1))  # (S, ..., H, D/H)
    weights = (keys * query.to(dtype).view(heads, -1)).sum(-1).softmax(0)  # (S, ..., H)
    out = (weights.unsqueeze(-1) * by_head).sum(0).flatten(-2).to(sources[0].dtype)
    if not return_weights:
        return out
    return out, (weights if query.dim() == 2 else weights.squeeze(-1))


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    return_weights: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    return_weights: Literal[True],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    return_weights: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over depth without stacking or copying the sources.

    Backward needs only references to the sources and three scalars per token, source and head; the rest is recomputed.

    Args:
        sources: S tensors `(..., D)` of one dtype and device. Strided and aliased ones are fine.
        query: the pseudo-query `(D,)`, or `(H, D / H)` for H heads.
        key_gain: the gain `(D,)` of the RMSNorm on keys; None means ones.
        eps: added to the mean square in that norm; None leaves the keys un-normalised.
        return_weights: also return the softmax weights.
        backend: "eager" runs on any device; "auto" picks the fastest that fits.

    Returns:
        `(..., D)` in the dtype of the sources. With `return_weights`, also `(S, ...)`, or `(S, ..., H)` for a query
        with heads, in at least fp32 and without gradient.

    Raises:
        ValueError: no sources; sources that differ in shape, dtype or device; a query or gain of another width; an
            unknown backend.
    """
    check_sources(sources, query, key_gain)
    if backend not in BACKENDS:
        raise ValueError(f"unknown depth-attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    heads = query if query.dim() == 2 else query.unsqueeze(0)  # (H, D/H)
    if key_gain is not None:
        heads = heads * key_gain.view_as(heads)
    if len(sources) == 1 and not return_weights:  # the softmax of one logit is 1, whatever the query
        return sources[0]
    out, weights = _DepthAttention.apply(heads, eps, *sources)
    if not return_weights:
        return out
    return out, (weights if query.dim() == 2 else weights.squeeze(-1))


class _DepthAttention(torch.autograd.Function):
    """Saves the sources by reference and per-token scalars; recomputes keys and products in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float | None, *sources: Tensor) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(sources[0])
        with torch.autocast(sources[0].device.type, enabled=False):
            query = query.to(dtype)  # (H, D/H)
            rows = [_by_head(source, query.shape[0]) for source in sources]  # M = tokens: (M, H, D/H)
            dots = torch.stack([torch.einsum("mhd,hd->mh", row.to(dtype), query) for row in rows])  # (S, M, H)
            if eps is None:
                rstd = dots.new_ones(dots.shape[0], dots.shape[1], 1)
            else:
                rstd = torch.stack([_mean_square(row.to(dtype)) for row in rows]).add_(eps).rsqrt_()  # (S, M, 1)
            weights = (dots * rstd).softmax(0)
            out = rows[0] * weights[0].unsqueeze(-1)
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                out.addcmul_(row.to(dtype), weight.unsqueeze(-1))
        ctx.save_for_backward(query, dots, rstd, weights, *sources)
        ctx.key_norm = eps is not None
        shape = sources[0].shape
        weights = weights.view(len(sources), *shape[:-1], -1)
        ctx.mark_non_differentiable(weights)
        return out.view(shape).to(sources[0].dtype), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        query, dots, rstd, weights, *sources = ctx.saved_tensors
        dtype = query.dtype
        with torch.autocast(grad.device.type, enabled=False):
            grad = _by_head(grad, query.shape[0]).to(dtype)  # (M, H, D/H)
            rows = [_by_head(source, query.shape[0]) for source in sources]
            grad_weights = torch.stack([torch.linalg.vecdot(grad, row.to(dtype)) for row in rows])  # (S, M, H)
            grad_logits = weights * (grad_weights - (weights * grad_weights).sum(0))
            to_query = grad_logits * rstd  # (S, M, H)
            # d logit / d source = rstd * query - source * dot * rstd^3 / D: the second part comes from the norm
            to_source = (grad_logits * dots).sum(-1, keepdim=True) * rstd.pow(3) / -query.numel()  # (S, M, 1)
            grad_query = torch.zeros_like(query)
            grads: list[Tensor | None] = []
            for k, source in enumerate(sources):
                row = rows[k].to(dtype)
                grad_query += torch.einsum("mh,mhd->hd", to_query[k], row)
                if not ctx.needs_input_grad[2 + k]:
                    grads.append(None)
                    continue
                grad_row = (grad * weights[k].unsqueeze(-1)).addcmul_(to_query[k].unsqueeze(-1), query)
                if ctx.key_norm:
                    grad_row.addcmul_(row, to_source[k].unsqueeze(-1))
                grads.append(grad_row.view(source.shape).to(source.dtype))
        return grad_query, None, *grads


def _by_head(source: Tensor, heads: int) -> Tensor:
    """`(..., D)` to `(M, H, D/H)`, a view where the strides allow it."""
    return source.reshape(-1, heads, source.shape[-1] // heads)


def _mean_square(row: Tensor) -> Tensor:
    """`(M, H, D/H)` to `(M, 1)`: the norm is over all of D, whatever the heads."""
    flat = row.flatten(1)
    return torch.linalg.vecdot(flat, flat).unsqueeze(-1) / flat.shape[-1]


def check_sources(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None) -> None:
    """Raise a ValueError that says what was given where the arguments of a depth read do not fit together."""
    if len(sources) == 0:
        raise ValueError("depth attention needs at least one source, got none")
    first = sources[0]
    for k, source in enumerate(sources):
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"sources must agree: source 0 is {tuple(first.shape)} {first.dtype} on {first.device}, "
                f"source {k} is {tuple(source.shape)} {source.dtype} on {source.device}"
            )
    width = first.shape[-1]
    if query.dim() not in (1, 2) or query.numel() != width:
        raise ValueError(f"query must be (D,) or (H, D / H) with D = {width}, got {tuple(query.shape)}")
    if key_gain is not None and key_gain.shape != (width,):
        raise ValueError(f"key_gain must be ({width},), got {tuple(key_gain.shape)}")
