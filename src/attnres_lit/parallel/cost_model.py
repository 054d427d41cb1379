"""What a model costs: parameters, FLOPs, memory traffic of the residual, bytes that cross the boundaries of a pipeline.

The traffic of the residual per token and site is Table 1 of arXiv 2603.15031, in numbers of width D, the sublayer's own
traffic excluded: what a read and a write move if each of their operations is one kernel.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

from torch import nn

from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.flops import head_flops, site_flops
from attnres_lit.model.recompute import Again
from attnres_lit.parallel.activations import width
from attnres_lit.parallel.depth import Cut, Depth, trace
from attnres_lit.parallel.partition import costs
from attnres_lit.parallel.traffic import traffic
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, HyperConnections, PreNorm
from attnres_lit.residual.attnres import AttnRes
from attnres_lit.residual.base import Residual


@dataclass(frozen=True)
class Hardware:
    """One rank, and its link.

    Args:
        device_flops: FLOP/s that matrix products reach, not the peak.
        memory_bandwidth: bytes/s of the device's memory.
        link_bandwidth: bytes/s that a rank sends at.
        link_latency: seconds from the end of a transfer to its arrival.

    Raises:
        ValueError: a rate that is not above 0, or a negative latency.
    """

    device_flops: float = 4e14
    memory_bandwidth: float = 3.35e12
    link_bandwidth: float = 50e9
    link_latency: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("device_flops", "memory_bandwidth", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.link_latency >= 0:
            raise ValueError(f"link_latency={self.link_latency} must be at least 0")


def standard_io(dim: float) -> float:
    """A residual merge: two reads, one write."""
    return 3 * dim


def mhc_io(streams: int, dim: float) -> float:
    """(8 m + 2) d + 2 m^2 + 4 m, for m streams."""
    return (8 * streams + 2) * dim + 2 * streams**2 + 4 * streams


def full_io(run: float, runs: float, dim: float) -> float:
    """(S + N) d: sites are read in N runs of S, each in two phases (Eq. 17)."""
    return (run + runs) * dim


def block_io(block_size: float, num_blocks: float, dim: float) -> float:
    """(N / S + 5) d, for N blocks of S sites."""
    return (num_blocks / block_size + 5) * dim


@singledispatch
def residual_io(residual: Residual) -> float:
    """Numbers that a site moves per token, on average over the sites.

    Of a strategy that is not listed below: every tensor that the site finds, and the sublayer's output, read once; what
    it leaves that is new written once.
    """
    depth = trace(residual)
    moved = [
        residual.dim + width(depth, before.tensors) + width(depth, set(after.tensors) - set(before.tensors))
        for before, after in zip(depth.cuts, depth.cuts[1:], strict=False)
    ]
    return sum(moved) / residual.num_sites


@residual_io.register
def _(residual: PreNorm) -> float:
    return standard_io(residual.dim)


@residual_io.register
def _(residual: DenseFormer) -> float:
    averages = sum((len(alpha) + 1) * residual.dim for alpha in residual.alpha.values())  # reads, one write
    return standard_io(residual.dim) + averages / residual.num_sites


@residual_io.register
def _(residual: MHC | HyperConnections) -> float:
    return mhc_io(residual.num_streams, residual.dim)


@residual_io.register
def _(residual: FullAttnRes) -> float:
    sites, dim = residual.num_sites, residual.dim
    if residual.window < sites or not residual.has_phases:
        return _one_shot_io(residual)
    run = round(sites**0.5)
    return full_io(run, sites / run, dim)


@residual_io.register
def _(residual: BlockAttnRes) -> float:
    blocks = len(residual.starts)
    if not residual.has_phases:
        return _one_shot_io(residual)
    return block_io(residual.num_sites / blocks, blocks, residual.dim)


def _one_shot_io(residual: AttnRes) -> float:
    """Keys and values counted apart as in appendix B; one write."""
    return sum((2 * count + 1) * residual.dim for count in residual.num_sources[:-1]) / residual.num_sites


def prefill_bytes(sources: int, tokens: int, dim: int, shards: int = 1, chunk: int | None = None, size: int = 2) -> int:
    """Bytes that depth sources take on a device while a prompt is read (section 4.2).

    Args:
        sources: finished blocks, N.
        tokens: length of the prompt, T.
        dim: model width D.
        shards: tensor-parallel devices that split the tokens, P.
        chunk: tokens read at a time; None: all.
        size: bytes of a number.
    """
    return sources * (min(tokens, chunk or tokens) // shards) * dim * size


class Parameters(NamedTuple):
    """Counts by part."""

    embedding: int
    sublayers: tuple[int, ...]  # of every site
    head: int  # and the final norm
    residual: dict[str, int]  # by name

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + sum(self.sublayers) + self.head + sum(self.residual.values())

    def of_stage(self, sites: range, uses: Sequence[Iterable[str]]) -> int:
        """Of the stage that has these sites, and the ends of the model that it holds.

        Args:
            sites: of the stage.
            uses: of `Depth`.
        """
        last = sites.stop == len(self.sublayers)
        used = set().union(*uses[sites.start : sites.stop], *([uses[-1]] if last else []))
        ends = self.embedding * (sites.start == 0) + self.head * last
        return ends + sum(self.sublayers[site] for site in sites) + sum(self.residual[name] for name in used)


def parameters(model: nn.Module, num_sites: int) -> Parameters:
    """Of a Transformer, which may be on the meta device; a tied head counts with the embedding."""
    embedding = head = 0
    sublayers, residual = [0] * num_sites, {}
    for name, parameter in model.named_parameters():
        part, _, rest = name.partition(".")
        if part == "embedding":
            embedding += parameter.numel()
        elif part == "sublayers":
            sublayers[int(rest.partition(".")[0])] += parameter.numel()
        elif part == "residual":
            residual[rest] = parameter.numel()
        else:
            head += parameter.numel()
    return Parameters(embedding, tuple(sublayers), head, residual)


class Flops(NamedTuple):
    """Per token, of matrix products."""

    forward: float
    training: float  # with the backward pass
    recomputed: float  # on top of that, by activation checkpointing


def flops(config: TransformerConfig, tokens: int, again: Again) -> Flops:
    """FLOPs per token of the whole model, in sequences of `tokens`."""
    sites = sum(site_flops(config, tokens))
    forward = sites + head_flops(config)
    return Flops(forward, 3 * forward, sites if again is True else 0.0)


class Boundary(NamedTuple):
    """Numbers per token that cross between two stages; as many gradients come back."""

    naive: int  # all Sources
    received: int  # what the receiver has not been sent before: the report's cache, Eq. 8
    exact: int  # what it has neither been sent nor made


def boundaries(depth: Depth, stages: Sequence[range], num_ranks: int) -> list[Boundary]:
    """Of every boundary; divided by D, tensors.

    Args:
        depth: the run of the strategy.
        stages: the sites of every stage.
        num_ranks: P; stages are dealt out in turn.
    """
    cuts = [depth.cuts[stage.start] for stage in stages[1:]]
    naive, exact = (traffic(cuts, num_ranks, cache) for cache in (False, True))
    report = received_only(cuts, num_ranks, depth.cuts[0])
    return [
        Boundary(width(depth, one.sent), width(depth, two), width(depth, three.sent))
        for one, two, three in zip(naive, report, exact, strict=False)
    ]


def received_only(cuts: Sequence[Cut], num_ranks: int, opened: Cut) -> list[tuple[int, ...]]:
    """What crosses every boundary if a rank keeps what it receives and forgets what it makes.

    Args:
        cuts: the Sources at every boundary.
        num_ranks: P.
        opened: the Sources before site 0, which the first rank has.
    """
    seen = [set(opened.tensors) if rank == 0 else set() for rank in range(num_ranks)]
    sent = []
    for stage, cut in enumerate(cuts, 1):
        at_hand = seen[stage % num_ranks]
        sent.append(tuple(i for i in cut.tensors if i not in at_hand))
        at_hand |= set(cut.tensors)
    return sent


def durations(
    config: TransformerConfig,
    stages: Sequence[range],
    io_bytes: float,
    tokens: int,
    seq_len: int,
    again: Again,
    hardware: Hardware,
) -> list[dict[str, float]]:
    """Seconds of a stage's forward F, backward B, and the halves of it, I for its inputs and W for its weights.

    A backward costs twice the forward, in FLOPs and in the traffic of the residual; W has half of the FLOPs and none of
    the traffic. What is computed again comes first in B or I.

    Args:
        config: sizes.
        stages: the sites of every stage.
        io_bytes: that the residual moves per token and site.
        tokens: of a microbatch.
        seq_len: of a sequence.
        again: what backward computes again.
        hardware: of a rank.
    """
    of_site, head = costs(config, seq_len), head_flops(config)
    found = []
    for stage in stages:
        compute = sum(of_site[stage.start : stage.stop]) * tokens / hardware.device_flops
        moved = len(stage) * io_bytes * tokens / hardware.memory_bandwidth
        repeated = {False: 0.0, "read": moved, True: compute + moved}[again]
        if again is True and stage.stop == config.num_sites:
            repeated -= head * tokens / hardware.device_flops
        inputs = compute + 2 * moved + repeated
        found.append({"F": compute + moved, "B": inputs + compute, "I": inputs, "W": compute})
    return found
