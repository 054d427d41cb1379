"""Sinkhorn-Knopp: scale exp(logits) until rows and columns sum to one (arXiv 2512.24880, Eq. 9)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnres_lit.ops.eager import compute_dtype


def sinkhorn(logits: Tensor, num_iters: int = 20) -> Tensor:
    """Project `exp(logits)` towards the doubly stochastic matrices.

    Every iteration normalises dim -2, then dim -1. The last axis is thus the exact one, and it is the axis to contract
    over: `X'[k] = sum_j H[k, j] X[j]` is a convex mix, while the columns carry what has not converged. The first
    iteration works on logarithms, so nothing overflows; after it no row or column sums to less than 1 / n^2, and the
    rest are divisions. Saves the logits and runs again in backward.

    Args:
        logits: `(..., n, n)`.
        num_iters: iterations, at least 1; 20 in the paper. Logits far from zero converge slowly.

    Returns:
        `(..., n, n)` in at least fp32; rows sum to one.
    """
    return _Sinkhorn.apply(logits, num_iters)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_iters: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.num_iters = num_iters
        matrix = _iterate(logits, num_iters)[0]
        return matrix.movedim((0, 1), (-2, -1)).contiguous().view(logits.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Half an iteration divides Y by its sums: with G = Y dY, the gradient before it is `G - Y sum(G)`."""
        (logits,) = ctx.saved_tensors
        matrix, columns, sums = _iterate(logits, ctx.num_iters)
        grad = _tokens_last(grad) * matrix
        for half, scale in reversed(list(enumerate(sums))):
            grad -= matrix * grad.sum(half % 2, keepdim=True)  # even halves normalise dim -2
            matrix = matrix * scale
        grad -= matrix * grad.sum(1, keepdim=True)
        grad -= columns * grad.sum(0, keepdim=True)
        return grad.movedim((0, 1), (-2, -1)).reshape(logits.shape).to(logits.dtype), None


def _iterate(logits: Tensor, num_iters: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The result `(n, n, M)`, the matrix after half an iteration, the sums that later halves divide by."""
    log = _tokens_last(logits.to(compute_dtype(logits)))
    log = log - log.logsumexp(0, keepdim=True)
    columns = log.exp()
    matrix = (log - log.logsumexp(1, keepdim=True)).exp()
    sums = []
    for _ in range(num_iters - 1):
        for axis in (0, 1):
            sums.append(matrix.sum(axis, keepdim=True))
            matrix = matrix / sums[-1]
    return matrix, columns, sums


def _tokens_last(matrix: Tensor) -> Tensor:
    """`(..., n, n)` to `(n, n, M)`: sums over n are then sums of long rows."""
    return matrix.reshape(-1, *matrix.shape[-2:]).movedim(0, -1).contiguous()
