"""Two-phase depth attention (arXiv 2603.15031, Algorithm 1): the finished sources for a whole block, then the rest.

Phase 1 answers all queries of a block against the finished sources in one pass and keeps softmax statistics; phase 2
merges the sources of the block itself by online softmax. Both phases together equal one-shot depth attention, and the
backward of phase 1 is one pass too: a finished source gets one gradient a block instead of one a site. The maximum and
the denominator are kept apart: their logarithmic sum would lose every digit of the denominator where logits are large
(2**24 in fp32).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres_lit.ops.attend import attend
from attnres_lit.ops.backends import Backend, engine, resolve
from attnres_lit.ops.depth_attention import check_sources, complete_rstd, fold


class DepthStats(NamedTuple):
    """Softmax statistics over the finished sources, in at least fp32: of Q queries, or of one without the Q axis."""

    out: Tensor  # (Q, ..., D): sum_s exp(logit_s - max) source_s, not normalised
    max: Tensor  # (Q, ...): max_s logit_s; a constant to autograd, since no read depends on it
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
    if key_gains is not None and key_gains.shape != queries.shape:
        raise ValueError(f"key_gains must be {tuple(queries.shape)} as queries, got {tuple(key_gains.shape)}")
    gains = [None] * len(queries) if key_gains is None else list(key_gains)
    stats = inter_block_reads(sources, list(queries), gains, eps=eps)
    return DepthStats(*(torch.stack(parts) for parts in zip(*stats, strict=True)))


def inter_block_reads(
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    key_gains: Sequence[Tensor | None],
    *,
    eps: float | None,
    rstd: Sequence[Tensor] = (),
    backend: Backend = "auto",
) -> list[DepthStats]:
    """`inter_block_attention` with the statistics of each query apart, so that each can be let go when it is merged.

    Args:
        sources: S tensors `(..., D)`.
        queries: Q tensors `(D,)` or `(H, D/H)`.
        key_gains: Q tensors `(D,)`, or None.
        eps: as in `depth_attention`.
        rstd: as in `depth_attention`.
        backend: as in `depth_attention`; "fla" has no phases and runs eager.

    Returns:
        Q `DepthStats`: `(..., D)`, `(...)` and `(...)`, the last two `(..., H)` for queries with heads.

    Raises:
        ValueError: as `depth_attention`.
    """
    for query in queries:
        check_sources(sources, query, None)
    heads = queries[0].shape[:-1]
    backend = resolve(backend, sources, heads.numel())
    rstd = complete_rstd(sources, rstd, eps, backend)
    read = attend(engine(backend), sources, rstd, fold(queries, key_gains))
    shape = (*sources[0].shape[:-1], *heads)
    tops, denoms = (scalars.view(len(queries), *shape).unbind() for scalars in (read.top, read.denom))
    return [DepthStats(*parts) for parts in zip(read.outs, tops, denoms, strict=True)]


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
    one = DepthStats(*(part[index] for part in stats))
    return merge_sources(one, [partial], query, key_gain, eps=eps, dtype=partial.dtype)


def merge_sources(
    stats: DepthStats,
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None,
    *,
    eps: float | None,
    dtype: torch.dtype,
    rstd: Sequence[Tensor] = (),
    backend: Backend = "auto",
) -> Tensor:
    """Phase 2 over any number of sources that phase 1 has not seen; with none, the statistics alone are normalised.

    Args:
        stats: of one query, from `inter_block_reads`.
        sources: tensors `(..., D)`; may be empty.
        query: as in phase 1.
        key_gain: as in phase 1.
        eps: as in phase 1.
        dtype: of the result.
        rstd: as in `depth_attention`.
        backend: as in phase 1.

    Returns:
        `(..., D)`.
    """
    backend = resolve(backend, sources or [stats.out], query.shape[0] if query.dim() == 2 else 1)
    rstd = complete_rstd(sources, rstd, eps, backend)
    return attend(engine(backend), sources, rstd, fold([query], [key_gain]), stats, dtype).outs[0]
