"""Doubly stochastic matrices as mixtures of permutations (Birkhoff; mHC-lite, arXiv 2601.05732)."""

from itertools import permutations
from math import factorial

import torch
from torch import Tensor

from attnres_lit.ops.eager import compute_dtype, full_precision


def permutation_mixture(logits: Tensor) -> Tensor:
    """`sum_p softmax(logits)_p P_p` over all permutations of n: exact, where Sinkhorn has to converge.

    Args:
        logits: `(..., n!)`, in lexicographic order of the permutations, the identity first.

    Returns:
        `(..., n, n)` in at least fp32; rows and columns sum to one. Permutation p has its ones at `[k, p(k)]`.

    Raises:
        ValueError: the number of logits is not a factorial.
    """
    count = logits.shape[-1]
    n = next((n for n in range(2, count + 1) if factorial(n) >= count), 0)
    if n == 0 or factorial(n) != count:
        raise ValueError(f"permutations need n! logits, got {count}")
    rows = torch.eye(n, dtype=compute_dtype(logits), device=logits.device)
    table = rows[torch.tensor(list(permutations(range(n))), device=logits.device)]  # (n!, n, n)
    with full_precision(logits):
        return (logits.to(rows.dtype).softmax(-1) @ table.flatten(1)).unflatten(-1, (n, n))
