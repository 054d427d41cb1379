"""What Full and Block AttnRes share: the learned queries, and the read that is one depth attention (arXiv 2603.15031).

    h_s = depth_attention(sources at s, query_s, key_gain_s)

Every site has its own pseudo-query and key gain, and so has the exit. Site 0 reads the embedding alone, so it owns
none. Queries start at zero: a plain mean of the sources, which a sublayer's input norm makes equal to PreNorm.

A run of sites may be read in two phases (Algorithm 1, appendix B): its first site answers the queries of all of them
against the sources that are finished by then, every later site merges what has come since. Sums and gradients are
those of the one-shot read, in another order.

`Sources.ahead` holds the statistics of the run's remaining sites, three tensors each, then the reciprocal RMS of the
finished sources. Without it a site reads one-shot.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres_lit.ops import (
    DepthStats,
    are_few,
    complete_rstd,
    depth_attention,
    inter_block_reads,
    merge_sources,
    resolve,
)
from attnres_lit.residual.base import Note, Residual, Sources

TwoPhase = Literal["auto"] | bool
TWO_PHASE_FROM = 2**18  # elements of a source: from here on, bytes cost more than calls (docs/benchmarks.md)


class Run(NamedTuple):
    """Consecutive sites that may share phase 1."""

    first: int
    stop: int
    seen: int  # sources that are finished before the first site


class AttnRes(Residual):
    """Depth attention over all sources; a subclass says in `open` and `write` what becomes a source.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads H; each attends over depth with its own slice of D.
        two_phase: read runs of sites in two phases; "auto": where that measured faster.
        eps: of the norm on keys.

    Raises:
        ValueError: `num_heads` does not divide `dim`; `eps` not above 0; an unknown `two_phase`.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        key_norm: bool = True,
        num_heads: int = 1,
        two_phase: TwoPhase = "auto",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sites, dim)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be above 0")
        if two_phase not in ("auto", True, False):
            raise ValueError(f"two_phase={two_phase!r} must be auto, true or false")
        self.num_heads = num_heads
        self.two_phase = two_phase
        self.eps = eps if key_norm else None
        self.query = nn.ParameterDict({str(site): torch.empty(dim) for site in range(1, num_sites)})
        self.exit_query = nn.Parameter(torch.empty(dim))
        if key_norm:
            self.key_gain = nn.ParameterDict({str(site): torch.empty(dim) for site in range(1, num_sites)})
            self.exit_key_gain = nn.Parameter(torch.empty(dim))
        self._runs: dict[int, Run] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Queries zero, gains one."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 1.0 if "key_gain" in name else 0.0)

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """Depth attention over every source. The note is what later sites may take from here, for `Sources.ahead`."""
        values, run = self.values(sources), self._runs.get(site)
        if site == 0:
            return values[0], ()
        stats, rstd = self._split(sources, run, site)
        if run and run.first == site and self._in_two_phases(values):
            stats = self._phase_one(run, values, rstd)
        if not (run and stats):
            return depth_attention(values, *self._query(site), rstd=rstd, **self._options), rstd
        now, unseen = DepthStats(*stats[:3]), values[run.seen :]
        known = {"rstd": rstd[run.seen :], "dtype": values[0].dtype}
        return merge_sources(now, unseen, *self._query(site), **known, **self._options), (*stats[3:], *rstd)

    def exit(self, sources: Sources) -> Tensor:
        """Depth attention over every source, with the exit's own query."""
        _, rstd = self._split(sources, None, self.num_sites)
        return depth_attention(self.values(sources), *self._query(self.num_sites), rstd=rstd, **self._options)

    def read_scale(self, site: int) -> float:
        """One over the number of sources, of which zero queries read the mean."""
        nothing = torch.empty(0, device="cpu")
        sources = self.open(nothing)
        for earlier in range(site):
            sources = self.write(sources, nothing, earlier, ())
        return 1 / len(self.values(sources))

    def weights(self, sources: Sources, site: int) -> Tensor | None:
        """The softmax weights of `site`; ones where there is a single source."""
        values = self.values(sources)
        if site == 0:
            return values[0].new_ones(1, *values[0].shape[:-1])
        return depth_attention(values, *self._query(site), return_weights=True, **self._options)[1]

    @staticmethod
    def values(sources: Sources) -> tuple[Tensor, ...]:
        """What a site attends to: the finished sources, and the partial last."""
        return sources.done if sources.partial is None else (*sources.done, sources.partial)

    def _query(self, site: int) -> tuple[Tensor, Tensor | None]:
        """Query and key gain of a site; `num_sites` stands for the exit."""
        last = site == self.num_sites
        query = self.exit_query if last else self.query[str(site)]
        if self.num_heads > 1:
            query = query.view(self.num_heads, -1)
        if self.eps is None:
            return query, None
        return query, self.exit_key_gain if last else self.key_gain[str(site)]

    def _share_phase_one(self, starts: Sequence[int], seen: Iterable[int]) -> None:
        """Let the sites from one start to the next be read in two phases; site 0 has no query, so its run is not."""
        for first, stop, count in zip(starts, (*starts[1:], self.num_sites), seen, strict=False):
            if first > 0 and stop - first > 1:
                self._runs |= dict.fromkeys(range(first, stop), Run(first, stop, count))

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "backend": self.depth_backend}

    def _split(self, sources: Sources, run: Run | None, site: int) -> tuple[Note, Note]:
        """`ahead` as the statistics of this and the coming sites of a run, and the reciprocal RMS of all of `done`."""
        ahead = sources.ahead
        # statistics begin with an `out`, which has the axes of a source
        stats = 3 * (run.stop - site) if run and ahead and ahead[0].dim() == sources.done[0].dim() else 0
        rstd = ahead[stats:]
        if not are_few(sources.done):  # a read of few sources has no use for it
            rstd = complete_rstd(sources.done, rstd, self.eps, self.depth_backend)
        return ahead[:stats], rstd

    def _phase_one(self, run: Run, values: Sequence[Tensor], rstd: Sequence[Tensor]) -> Note:
        """Statistics of all sites of a run, three tensors each."""
        queries, gains = zip(*map(self._query, range(run.first, run.stop)), strict=True)
        return tuple(chain(*inter_block_reads(values, queries, gains, rstd=rstd, **self._options)))

    def _in_two_phases(self, values: Sequence[Tensor]) -> bool:
        if self.split_backward:  # torch frees the graph of a weight's part, and phase 1 belongs to several of them
            return False
        if self.two_phase != "auto":
            return bool(self.two_phase)
        large = values[0].numel() >= TWO_PHASE_FROM and not self.recomputed
        return large and resolve(self.depth_backend, values) != "fla"
