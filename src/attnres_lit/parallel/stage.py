"""One stage of a pipeline: some sites of the model, and what crosses its boundaries."""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.runner import Part
from attnres_lit.parallel.block_cache import BlockCache, Keep, Take
from attnres_lit.parallel.depth import Cut, Depth, trace
from attnres_lit.parallel.partition import partition
from attnres_lit.parallel.settings import PipelineSettings, uses_cache
from attnres_lit.parallel.traffic import Traffic, traffic
from attnres_lit.residual.base import Residual, Sources


class Layout(NamedTuple):
    """A model cut into stages."""

    depth: Depth
    sites: list[range]  # of every stage
    traffic: list[Traffic]  # of every stage
    num_ranks: int  # stage s lives on rank s % num_ranks

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline, virtual ones counted."""
        return len(self.sites)

    def cut(self, stage: int) -> Cut:
        """The Sources that enter a stage other than the first."""
        return self.depth.cuts[self.sites[stage].start]

    def parameters(self, stage: int) -> frozenset[str]:
        """Names of the residual's parameters that a stage uses."""
        sites = [*self.sites[stage], *([len(self.depth.uses) - 1] if stage == self.num_stages - 1 else [])]
        return frozenset().union(*(self.depth.uses[site] for site in sites))

    def reused_parameters(self) -> list[str]:
        """The residual's parameters that several sites of one stage use."""
        of_stages = [self.depth.uses[sites.start : sites.stop] for sites in self.sites]
        counts = [Counter(name for uses in of_sites for name in uses) for of_sites in of_stages]
        return sorted({name for of_stage in counts for name, sites in of_stage.items() if sites > 1})

    def shared_parameters(self) -> dict[str, int]:
        """The residual's parameters that several stages use, and the first rank that has each."""
        users: dict[str, list[int]] = defaultdict(list)
        for stage in range(self.num_stages):
            for name in self.parameters(stage):
                users[name].append(stage)
        return {name: min(s % self.num_ranks for s in stages) for name, stages in users.items() if len(stages) > 1}


def cut_model(
    config: TransformerConfig,
    residual: Residual,
    tokens: int,
    asked: PipelineSettings,
    split_points: Sequence[int] | None = None,
) -> Layout:
    """Decide on the stages.

    Args:
        config: sizes of the model.
        residual: the strategy, with the values of all its parameters.
        tokens: length of a sequence.
        asked: the pipeline.
        split_points: first sites of all stages but the first; None balances them.

    Raises:
        ValueError: as `partition` and `uses_cache`.
    """
    depth, num_ranks = trace(residual), asked.pipeline_parallel_size
    sites = partition(config, depth.cuts, asked.num_stages, tokens, split_points)
    boundaries = [depth.cuts[each.start] for each in sites[1:]]
    cache = uses_cache(asked.cache_blocks, boundaries, num_ranks)
    return Layout(depth, sites, traffic(boundaries, num_ranks, cache), num_ranks)


class Stage(nn.Module):
    """Reads what the stage before sent, runs its sites, returns what the next one lacks; the last returns logits.

    Args:
        model: the whole model, of which the stage takes its part; parameters and their names stay the model's.
        layout: how it is cut.
        index: of this stage.
        cache: of the rank.
        precision: the context in which the forward runs, autocast in mixed precision.
    """

    def __init__(
        self,
        model: Transformer,
        layout: Layout,
        index: int,
        cache: BlockCache,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.layout, self.index = layout, index
        self.is_first, self.is_last = index == 0, index == layout.num_stages - 1
        self.model = part(model, layout.sites[index], layout.parameters(index), self.is_first, self.is_last)
        self.cut_in = None if self.is_first else layout.cut(index)
        self.cut_out = None if self.is_last else layout.cut(index + 1)
        self.traffic = layout.traffic[index]
        self.kept = frozenset(self.traffic.kept)
        later = layout.traffic[index + layout.num_ranks :: layout.num_ranks]
        self.last_use = set(self.traffic.cached) - {number for stage in later for number in stage.cached}
        self.cache = cache
        self.precision = precision

    def forward(self, *tensors: Tensor, microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            tensors: the tokens `(B, T)` in the first stage, else what `traffic` says is received.
            microbatch: its index, int64 `(1,)`.
        """
        model, at = self.model, int(microbatch)
        with self.precision():
            if self.cut_in is None:
                sources = model.residual.open(model.embed(*tensors))
            else:
                sources = self._gather(self.cut_in, tensors, at)
            sources = model.layers(sources)
            if self.cut_out is None:
                return model.head(model.norm(model.residual.exit(sources)))
            return self._hand_over(self.cut_out, sources, at)

    @property
    def sites(self) -> str:
        """The first and the last one."""
        mine = self.layout.sites[self.index]
        return f"{mine.start}-{mine.stop - 1}"

    @property
    def part(self) -> Part:
        """The residual of this stage, and what it begins with."""
        cuts, residual = self.layout.depth.cuts, self.model.residual
        if self.cut_in is None:
            return Part(residual)
        start = self.layout.sites[self.index].start
        made = list(dict.fromkeys(number for cut in cuts[: start + 1] for number in cut.done))
        return Part(residual, start, tuple(map(made.index, self.cut_in.done)), len(made))

    @property
    def dtype(self) -> torch.dtype:
        """Of the sources."""
        with self.precision():
            return self.model.source_dtype(next(self.parameters()).device)

    @property
    def bytes_without_cache(self) -> int:
        """Of all Sources at the stage's end, per token."""
        sources = () if self.cut_out is None else self.cut_out.tensors
        return sum(self.layout.depth.shapes[number].numel() for number in sources) * self.dtype.itemsize

    def _gather(self, cut: Cut, tensors: tuple[Tensor, ...], microbatch: int) -> Sources:
        """The Sources that were cut, out of what was received and what the rank has."""
        received, cached = self.traffic.received, self.traffic.cached
        known = dict(zip(received, Keep.apply(self.cache, microbatch, received, self.kept, *tensors), strict=True))
        if cached:
            known |= zip(cached, Take.apply(self.cache, microbatch, cached, tensors[0]), strict=True)
            for number in self.last_use:
                if (microbatch, number) not in self.cache.awaits:
                    self.cache.pop(microbatch, number)
        return Sources(tuple(known[i] for i in cut.done), None if cut.partial is None else known[cut.partial])

    def _hand_over(self, cut: Cut, sources: Sources, microbatch: int) -> tuple[Tensor, ...]:
        """What the next stage lacks; what was produced here, and a later stage of this rank needs, is kept."""
        known = dict(zip(cut.done, sources.done, strict=True))
        if cut.partial is not None:
            known[cut.partial] = sources.stream
        inherited = set() if self.cut_in is None else set(self.cut_in.tensors)
        produced = [number for number in self.traffic.sent if number not in inherited]
        tensors = [known[number] for number in produced]
        known |= zip(produced, Keep.apply(self.cache, microbatch, produced, self.kept, *tensors), strict=True)
        sent = tuple(known[number].contiguous() for number in self.traffic.sent)
        if odd := [tensor.dtype for tensor in sent if tensor.dtype != self.dtype]:
            raise TypeError(
                f"{type(self.model.residual).__name__} passes on a tensor in {odd[0]}: in a pipeline all must have the "
                f"dtype of the embedding, {self.dtype}"
            )
        return sent


def part(model: Transformer, sites: range, parameters: frozenset[str], is_first: bool, is_last: bool) -> Transformer:
    """A Transformer that shares the modules of `model` at some sites and has no others.

    Args:
        model: the whole model; it stays as it is.
        sites: the sublayers.
        parameters: names of the residual's parameters.
        is_first: with the embedding.
        is_last: with the final norm and the head.
    """
    mine = copy.copy(model)
    mine._modules = dict(model._modules)
    mine.sublayers = nn.ModuleDict({str(site): model.sublayers[str(site)] for site in sites})
    mine.residual = _with_parameters(model.residual, parameters)
    absent = (() if is_first else ("embedding",)) + (() if is_last else ("norm", "head"))
    for name in absent:
        mine._modules[name] = None
    return mine


def hold(model: Transformer, stages: Sequence[Stage]) -> None:
    """Let go of everything in `model` that no stage of this rank uses; what is left keeps its name."""
    sites = {key for stage in stages for key in stage.model.sublayers}
    for key in set(model.sublayers) - sites:
        del model.sublayers[key]
    for name in ("embedding", "norm", "head"):
        if all(stage.model._modules[name] is None for stage in stages):
            model._modules[name] = None
    used = {name: p for stage in stages for name, p in stage.model.residual.named_parameters()}
    for name in [name for name, _ in model.residual.named_parameters()]:
        owner, _, last = name.rpartition(".")
        model.residual.get_submodule(owner)._parameters[last] = used.get(name)


def _with_parameters(module: Any, names: frozenset[str], prefix: str = "") -> Any:
    """A copy of a module that shares the named parameters and has None in place of the others."""
    mine = copy.copy(module)
    mine._parameters = {name: p if prefix + name in names else None for name, p in module._parameters.items()}
    mine._modules = {
        name: child if child is None else _with_parameters(child, names, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return mine
