"""A sum of tensors under scalar weights, in at least fp32, that keeps no copy of the tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnres_lit.ops.depth_attention import compute_dtype


def weighted_sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`sum_s weights[s] * sources[s]`, accumulated in at least fp32 and rounded once.

    Args:
        sources: S tensors of one shape and dtype.
        weights: `(S,)`.

    Returns:
        A tensor like the sources.

    Raises:
        ValueError: the number of weights is not the number of sources.
    """
    if weights.shape != (len(sources),):
        raise ValueError(f"weights must be ({len(sources)},), one per source, got {tuple(weights.shape)}")
    return _WeightedSum.apply(weights, *sources)


class _WeightedSum(torch.autograd.Function):
    """Saves the sources by reference."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        dtype = compute_dtype(sources[0])
        weights = weights.to(dtype)
        out = sources[0].to(dtype) * weights[0]
        for source, weight in zip(sources[1:], weights[1:], strict=True):
            out.addcmul_(source.to(dtype), weight)
        return out.to(sources[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        weights, *sources = ctx.saved_tensors
        dtype = compute_dtype(grad)
        flat = grad.to(dtype).flatten()
        with torch.autocast(grad.device.type, enabled=False):
            grad_weights = torch.stack([torch.dot(flat, source.to(dtype).flatten()) for source in sources])
        grads = [
            (grad.to(dtype) * weight).to(source.dtype) if needed else None
            for weight, source, needed in zip(weights.to(dtype), sources, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad_weights.to(weights.dtype), *grads
