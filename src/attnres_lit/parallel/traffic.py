"""What crosses each boundary of a pipeline, and what a rank has already: the cross-stage cache (arXiv 2603.15031, 4.1).

Stage s lives on rank s % P. Without the cache a boundary carries all Sources. With it a rank keeps every tensor that it
received or produced and that a later virtual stage of its own needs, and a boundary carries only what the receiver
lacks: the least there can be. The gradient of a tensor goes back over the same edge, once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from attnres_lit.parallel.depth import Cut


class Traffic(NamedTuple):
    """Tensors of one stage, by their number in `Depth`."""

    received: tuple[int, ...]  # from the stage before
    cached: tuple[int, ...]  # taken from the cache of the rank
    kept: tuple[int, ...]  # received or produced here, and put into the cache for a later stage of the rank
    sent: tuple[int, ...]  # to the stage after


def traffic(cuts: Sequence[Cut], num_ranks: int, cache: bool) -> list[Traffic]:
    """Traffic of every stage.

    Args:
        cuts: the Sources at every boundary, one fewer than stages.
        num_ranks: P; stages are dealt out in turn.
        cache: whether ranks keep what they have seen.
    """
    carried = [(), *(cut.tensors for cut in cuts), ()]  # into stage s: carried[s]; out of it: carried[s + 1]
    stages = range(len(cuts) + 1)
    seen: list[set[int]] = [set() for _ in range(num_ranks)]
    received, cached = [], []
    for stage in stages:
        on_rank = seen[stage % num_ranks]
        known = on_rank if cache else set()
        received.append(tuple(i for i in carried[stage] if i not in known))
        cached.append(tuple(i for i in carried[stage] if i in known))
        on_rank |= {*carried[stage], *carried[stage + 1]}

    def kept(stage: int) -> tuple[int, ...]:
        wanted = {i for later in cached[stage + num_ranks :: num_ranks] for i in later}
        produced = (i for i in carried[stage + 1] if i not in carried[stage])
        return tuple(i for i in (*received[stage], *produced) if i in wanted)

    return [Traffic(received[s], cached[s], kept(s), (*received, ())[s + 1]) for s in stages]
