"""Two-phase depth attention (arXiv 2603.15031, Algorithm 1): the finished sources for a whole block, then the partial.

Phase 1 answers all queries of a block against the finished sources in one pass and keeps softmax statistics; phase 2
merges the one source that is still being written by online softmax. Both phases together equal one-shot depth
attention. The maximum and the denominator are kept apart: their logarithmic sum would lose every digit of the
denominator where logits are large (2**24 in fp32).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres_lit.ops.depth_attention import check_sources, compute_dtype


class DepthStats(NamedTuple):
    """Softmax statistics of Q queries over the finished sources, in at least fp32."""

    out: Tensor  # (Q, ..., D): sum_s exp(logit_s - max) source_s, not normalised
    max: Tensor  # (Q, ...): max_s logit_s
    denom: Tensor  # (Q, ...): sum_s exp(logit_s - max)


def inter_block_attention(
    sources: Sequence[Tensor], queries: Tensor, key_gains: Tensor | None = None, *, eps: float | None = 1e-6
) -> DepthStats:
    """Phase 1: every query of a block against the finished sources, in one pass over them.

    Args:
        sources: S tensors `(..., D)` of one dtype and device.
        queries: `(Q, D)`, one row per site of the block.
        key_gains: `(Q, D)`, the gains of the RMSNorm on keys; None means ones.
        eps: as in `depth_attention`.

    Returns:
        `DepthStats`; where a site has no partial, its sublayer input is `out / denom`.

    Raises:
        ValueError: as `depth_attention`; gains of another shape than the queries.
    """
    for query in queries:
        check_sources(sources, query, None)
    if key_gains is not None and key_gains.shape != queries.shape:
        raise ValueError(f"key_gains must be {tuple(queries.shape)} as queries, got {tuple(key_gains.shape)}")
    folded = queries if key_gains is None else queries * key_gains
    logits = torch.stack([_logits(source, folded, eps) for source in sources])  # (S, Q, ...)
    maximum = logits.amax(0)
    exps = (logits - maximum).exp()
    out = sum(exp.unsqueeze(-1) * source.to(exp.dtype) for exp, source in zip(exps, sources, strict=True))
    return DepthStats(out, maximum, exps.sum(0))  # pyrefly: ignore[bad-argument-type]  (there is a source)


def merge_partial(
    stats: DepthStats,
    index: int,
    partial: Tensor,
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
) -> Tensor:
    """Phase 2: merge the partial into query `index` of the statistics by online softmax.

    Args:
        stats: what `inter_block_attention` returned for the block.
        index: which of its Q queries.
        partial: `(..., D)`, the sum still being written.
        query: `(D,)`, the same query as row `index` of phase 1.
        key_gain: `(D,)`, its gain; None means ones.
        eps: as in phase 1.

    Returns:
        `(..., D)` in the dtype of the partial.
    """
    check_sources([partial], query, key_gain)
    folded = query if key_gain is None else query * key_gain
    logit = _logits(partial, folded.unsqueeze(0), eps)[0]  # (...)
    maximum = torch.maximum(stats.max[index], logit)
    old, new = (stats.max[index] - maximum).exp(), (logit - maximum).exp()
    total = old.unsqueeze(-1) * stats.out[index] + new.unsqueeze(-1) * partial.to(new.dtype)
    return (total / (old * stats.denom[index] + new).unsqueeze(-1)).to(partial.dtype)


def _logits(source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
    """`(..., D)` and `(Q, D)` to `(Q, ...)`."""
    dtype = compute_dtype(source)
    with torch.autocast(source.device.type, enabled=False):
        source = source.to(dtype)
        logits = torch.einsum("...d,qd->q...", source, queries.to(dtype))
        if eps is None:
            return logits
        return logits * (source.square().mean(-1) + eps).rsqrt()
