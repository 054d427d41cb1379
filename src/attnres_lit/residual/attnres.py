"""What Full and Block AttnRes share: the learned queries, and the read that is one depth attention (arXiv 2603.15031).

    h_s = depth_attention(sources at s, query_s, key_gain_s)

Every site has its own pseudo-query and key gain, and so has the exit. Site 0 reads the embedding alone, so it owns
none. Queries start at zero: a plain mean of the sources, which a sublayer's input norm makes equal to PreNorm.

A run of sites may be read in two phases (Algorithm 1, appendix B): its first site answers the queries of all of them
against the sources that are finished by then, every later site merges what has come since. Sums and gradients are
those of the one-shot read, in another order.

`Sources.ahead` holds the statistics of the run's remaining sites, three tensors each, then the reciprocal RMS of the
finished sources. Without it a site reads one-shot.

The ablations of depth attention (`query`, `mixing`, see `ops/mixing.py`) always read one-shot, by plain formulas.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres_lit.ops import (
    DepthStats,
    Mixing,
    Query,
    complete_rstd,
    depth_attention,
    depth_read,
    inter_block_reads,
    merge_sources,
    read_alone,
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
        query: "static", a learned query per site, or "input", a learned matrix times the newest source.
        mixing: "softmax"; "sigmoid", whose weights do not compete; "static", the softmax of learned numbers, without
            queries and keys, so that `key_norm` and `eps` have no meaning.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads H; each attends over depth with its own slice of D.
        two_phase: read runs of sites in two phases; "auto": where that measured faster.
        eps: of the norm on keys.
        num_sources: how many each site reads, and, last, the exit; None: the embedding and every output before it.

    Raises:
        ValueError: `num_heads` does not divide `dim`; `eps` not above 0; an unknown `query`, `mixing` or `two_phase`,
            or options that exclude one another.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        query: Query = "static",
        mixing: Mixing = "softmax",
        key_norm: bool = True,
        num_heads: int = 1,
        two_phase: TwoPhase = "auto",
        eps: float = 1e-6,
        num_sources: Sequence[int] | None = None,
    ) -> None:
        super().__init__(num_sites, dim)
        self._depth_read = depth_read(query, mixing, num_heads)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be above 0")
        if two_phase not in ("auto", True, False):
            raise ValueError(f"two_phase={two_phase!r} must be auto, true or false")
        self.has_phases = self._depth_read is depth_attention
        if two_phase is True and not self.has_phases:
            raise ValueError(
                "two_phase=true needs the softmax of static queries: set it to auto, or query=static and mixing=softmax"
            )
        self.num_sources = tuple(range(1, num_sites + 2) if num_sources is None else num_sources)
        self.query_from = query  # its name is taken by the parameters
        self.mixing = mixing
        self.num_heads = num_heads
        self.two_phase = two_phase
        self.eps = eps if key_norm and mixing != "static" else None
        if mixing == "static":
            heads = [num_heads] if num_heads > 1 else []
            self._own("logits", [(*heads, count) for count in self.num_sources[1:]])
        else:
            self._own("query", [(dim,) if query == "static" else (dim, dim)] * num_sites)
        if self.eps is not None:
            self._own("key_gain", [(dim,)] * num_sites)
        self._runs: dict[int, Run] = {}
        self.reset_parameters()

    def _own(self, name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        """A parameter for every site but the first, and for the exit."""
        *sites, last = shapes
        setattr(self, name, nn.ParameterDict({str(site): torch.empty(shape) for site, shape in enumerate(sites, 1)}))
        setattr(self, f"exit_{name}", nn.Parameter(torch.empty(last)))

    def reset_parameters(self) -> None:
        """Gains one, all else zero: every source weighs the same."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 1.0 if "key_gain" in name else 0.0)

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """The matrices that make queries of the input."""
        return [parameter for name, parameter in self.named_parameters() if "query" in name and parameter.dim() > 1]

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """Depth attention over every source. The note is what later sites may take from here, for `Sources.ahead`."""
        return (sources.done[0], ()) if site == 0 else self._read(sources, site)

    def exit(self, sources: Sources) -> Tensor:
        """Depth attention over every source, with the exit's own query."""
        return self._read(sources, self.num_sites)[0]

    def _read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        values, (query, gain) = self.values(sources), self._query(site)
        if (alone := self._read_alone(values, query, gain)) is not None:
            return alone, ()
        run = self._runs.get(site)
        stats, rstd = self._split(sources, run, site)
        if run and run.first == site and self._in_two_phases(values):
            stats = self._phase_one(run, values, rstd)
        if not (run and stats):
            return self._depth_read(values, query, gain, rstd=rstd, **self._options), rstd
        now, unseen = DepthStats(*stats[:3]), values[run.seen :]
        known = {"rstd": rstd[run.seen :], "dtype": values[0].dtype}
        return merge_sources(now, unseen, query, gain, **known, **self._options), (*stats[3:], *rstd)

    def read_scale(self, site: int) -> float:
        """Of the mean of the sources, which equal weights read; sigmoids of zero are a half each."""
        if site == 0:
            return 1.0
        return 0.5 if self.mixing == "sigmoid" else 1 / self.num_sources[site]

    def weights(self, sources: Sources, site: int) -> Tensor | None:
        """What `site` takes of each source: softmax weights, or sigmoids; ones where there is a single source."""
        values = self.values(sources)
        if site == 0:
            return values[0].new_ones(1, *values[0].shape[:-1])
        return self._depth_read(values, *self._query(site), return_weights=True, **self._options)[1]

    @staticmethod
    def values(sources: Sources) -> tuple[Tensor, ...]:
        """What a site attends to: the finished sources, and the partial last."""
        return sources.done if sources.partial is None else (*sources.done, sources.partial)

    def _query(self, site: int) -> tuple[Tensor, Tensor | None]:
        """What makes the logits of a site, its query as a rule, and its key gain; `num_sites` stands for the exit."""
        last = site == self.num_sites

        def of_site(name: str) -> Tensor:
            return getattr(self, f"exit_{name}") if last else getattr(self, name)[str(site)]

        query = of_site("logits" if self.mixing == "static" else "query")
        if self.has_phases and self.num_heads > 1:
            query = query.view(self.num_heads, -1)
        return query, None if self.eps is None else of_site("key_gain")

    def _share_phase_one(self, starts: Sequence[int], seen: Iterable[int]) -> None:
        """Let the sites from one start to the next be read in two phases; site 0 has no query, so its run is not."""
        for first, stop, count in zip(starts, (*starts[1:], self.num_sites), seen, strict=False):
            if self.has_phases and first > 0 and stop - first > 1:
                self._runs |= dict.fromkeys(range(first, stop), Run(first, stop, count))

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "backend": self.depth_backend}

    def _split(self, sources: Sources, run: Run | None, site: int) -> tuple[Note, Note]:
        """`ahead` as the statistics of this and the coming sites of a run, and the reciprocal RMS of all of `done`."""
        ahead = sources.ahead
        # statistics begin with an `out`, which has the axes of a source
        stats = 3 * (run.stop - site) if run and ahead and ahead[0].dim() == sources.done[0].dim() else 0
        if not self.has_phases:
            return (), ()
        return ahead[:stats], complete_rstd(sources.done, ahead[stats:], self.eps, self.depth_backend)

    def _read_alone(self, values: tuple[Tensor, ...], query: Tensor, gain: Tensor | None) -> Tensor | None:
        """In inference, where sharing work between reads gains nothing: one call, unless phases are asked for."""
        if self.two_phase is True or not self.has_phases:
            return None
        return read_alone(values, query, gain, self.eps, self.depth_backend)

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
