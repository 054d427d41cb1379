"""Sinkhorn-Knopp: scale exp(logits) until rows and columns sum to one (arXiv 2512.24880, Eq. 9)."""

import torch
from torch import Tensor

from attnres_lit.ops.depth_attention import compute_dtype


def sinkhorn(logits: Tensor, num_iters: int = 20) -> Tensor:
    """Project `exp(logits)` towards the doubly stochastic matrices.

    Works on logarithms, so nothing overflows. Every iteration normalises dim -2, then dim -1. The last axis is thus
    the exact one, and it is the axis to contract over: `X'[k] = sum_j H[k, j] X[j]` is a convex mix, while the columns
    carry what has not converged.

    Args:
        logits: `(..., n, n)`.
        num_iters: iterations; 20 in the paper. Logits far from zero converge slowly.

    Returns:
        `(..., n, n)` in at least fp32; rows sum to one.
    """
    log = logits.to(compute_dtype(logits))
    for _ in range(num_iters):
        log = log - torch.logsumexp(log, -2, keepdim=True)
        log = log - torch.logsumexp(log, -1, keepdim=True)
    return log.exp()
