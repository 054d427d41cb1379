"""What a pipeline may be asked for: every refusal that needs neither processes nor data, in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnres_lit.parallel.depth import Cut
from attnres_lit.parallel.traffic import traffic

SINGLE = ("GPipe", "1F1B")  # schedules of one stage a rank
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
Cache = Literal["auto"] | bool


@dataclass(frozen=True)
class PipelineSettings:
    """A pipeline, as a user asks for it.

    Args:
        pipeline_parallel_size: ranks P that share one copy of the model.
        num_microbatches: parts M that the batch of a rank's pipeline is cut into.
        schedule: one of `SCHEDULES`, as torch.distributed.pipelining names them.
        virtual_stages: stages V of every rank; stage s lives on rank s % P.
        cache_blocks: whether ranks keep what their later stages read; "auto": where that saves traffic.
    """

    pipeline_parallel_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1F1B"
    virtual_stages: int = 1
    cache_blocks: Cache = "auto"

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline, P x V."""
        return self.pipeline_parallel_size * self.virtual_stages


def check_pipeline(
    asked: PipelineSettings,
    batch_size: int | None = None,
    tie_embeddings: bool = False,
    compiled: bool = False,
) -> None:
    """Refuse what cannot run.

    Args:
        asked: the pipeline.
        batch_size: sequences that all microbatches share; None where it is not known yet.
        tie_embeddings: whether the head uses the embedding matrix.
        compiled: whether sublayers are compiled.

    Raises:
        ValueError: says which setting to change.
    """
    ranks, count, virtual = asked.pipeline_parallel_size, asked.num_microbatches, asked.virtual_stages
    if asked.schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {asked.schedule!r}: known are {', '.join(SCHEDULES)}")
    for name in ("pipeline_parallel_size", "num_microbatches", "virtual_stages"):
        if getattr(asked, name) < 1:
            raise ValueError(f"{name}={getattr(asked, name)} must be at least 1")
    if asked.cache_blocks not in ("auto", True, False):
        raise ValueError(f"cache_blocks={asked.cache_blocks!r} must be auto, true or false")
    if virtual > 1 and asked.schedule in SINGLE:
        several = ", ".join(name for name in SCHEDULES if name not in SINGLE)
        raise ValueError(
            f"schedule {asked.schedule} has one stage a rank, virtual_stages={virtual}: set it to 1 or use {several}"
        )
    if asked.schedule == "1F1B" and count < ranks:
        raise ValueError(f"schedule 1F1B needs as many microbatches as stages, {ranks}: num_microbatches={count}")
    rounds = max(1, count // ranks)
    if asked.schedule.startswith("Interleaved") and count % rounds:
        raise ValueError(
            f"schedule {asked.schedule} works in {rounds} rounds, of {ranks} microbatches or a few more each: "
            f"num_microbatches={count} must be a multiple of {rounds}"
        )
    if asked.schedule == "InterleavedZeroBubble" and compiled:
        raise ValueError("schedule InterleavedZeroBubble splits the backward pass, which compiled sublayers cannot")
    if batch_size is not None and batch_size % count:
        raise ValueError(f"num_microbatches={count} must divide the batch size, {batch_size}")
    if tie_embeddings and asked.pipeline_parallel_size * virtual > 1:
        raise ValueError("tied embeddings across stages: set tie_embeddings to false or use a single stage")
    if asked.cache_blocks is True and virtual == 1:
        raise ValueError("cache_blocks=true needs virtual_stages above 1: a rank with one stage reads nothing twice")


def uses_cache(cache_blocks: Cache, boundaries: Sequence[Cut], num_ranks: int) -> bool:
    """Whether ranks keep what they have seen: as asked, and with "auto" where it saves traffic.

    Args:
        cache_blocks: what was asked for.
        boundaries: the Sources between stages.
        num_ranks: P.

    Raises:
        ValueError: asked for, and no tensor reaches a rank twice.
    """
    saves = any(stage.cached for stage in traffic(boundaries, num_ranks, cache=True))
    if cache_blocks is True and not saves:
        raise ValueError("cache_blocks=true has nothing to cache: no source of this residual reaches a rank twice")
    return saves and cache_blocks is not False
