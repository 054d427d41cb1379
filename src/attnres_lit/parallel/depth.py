"""What a residual strategy carries from site to site, learned by running it once on a single token.

A pipeline may then cut it anywhere, whatever the strategy: the run tells which tensors cross a cut, which of them are
one and the same, and which parameters each site uses.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from attnres_lit.residual.base import Residual, Sources


class Cut(NamedTuple):
    """The Sources between two sites, every tensor as a number: the same tensor has the same number at every cut."""

    done: tuple[int, ...]
    partial: int | None

    @property
    def tensors(self) -> tuple[int, ...]:
        """Each tensor once: a partial that is also a finished source does not count again."""
        return tuple(dict.fromkeys((*self.done, *(() if self.partial is None else (self.partial,)))))


class Depth(NamedTuple):
    """One run of a strategy through all its sites."""

    cuts: tuple[Cut, ...]  # cuts[s] lies before site s; the last one, before the exit
    shapes: tuple[Size, ...]  # of every tensor, without the leading (B, T)
    uses: tuple[frozenset[str], ...]  # names of the parameters that site s uses (site 0: `open` too); last, the exit


def trace(residual: Residual) -> Depth:
    """Run `residual`, whose parameters must have values, on one token.

    Args:
        residual: the strategy, with all its parameters.

    Raises:
        ValueError: it passes on a tensor that does not begin with the axes `(B, T)`.
    """
    names: dict[Tensor, list[str]] = {}  # a parameter may have several
    for name, parameter in residual.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    device = next(iter(names)).device if names else None
    known: list[Tensor] = []
    walked: set[Any] = set()
    cuts: list[Cut] = []
    uses: list[frozenset[str]] = []

    def number(tensor: Tensor) -> int:
        for i, each in enumerate(known):
            if each is tensor:
                return i
        if tensor.shape[:2] != (1, 1):
            name = type(residual).__name__
            raise ValueError(f"{name} passes on a tensor of shape {tuple(tensor.shape)}: it must begin with (B, T)")
        known.append(tensor)
        return len(known) - 1

    def used(tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset(name for leaf in _leaves(tensors, walked) for name in names.get(leaf, ()))

    backend, residual.depth_backend = residual.depth_backend, "eager"  # it may be one for another device
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            sources = residual.open(torch.zeros(1, 1, residual.dim, device=device))
            for site in range(residual.num_sites):
                cuts.append(Cut(tuple(map(number, sources.done)), _optional(number, sources.partial)))
                h, note = residual.read(sources, site)
                sources = residual.write(sources, torch.zeros_like(h), site, note)
                sources = Sources(sources.done, sources.partial)
                uses.append(used((h, *tensors_of(sources))))
            cuts.append(Cut(tuple(map(number, sources.done)), _optional(number, sources.partial)))
            uses.append(used([residual.exit(sources)]))
    finally:
        residual.depth_backend = backend
        for parameter in frozen:
            parameter.requires_grad_(False)
    return Depth(tuple(cuts), tuple(tensor.shape[2:] for tensor in known), tuple(uses))


def tensors_of(sources: Sources) -> tuple[Tensor, ...]:
    """The finished sources, then the partial if there is one."""
    return sources.done if sources.partial is None else (*sources.done, sources.partial)


def _optional(number: Any, tensor: Tensor | None) -> int | None:
    return None if tensor is None else number(tensor)


def _leaves(tensors: Iterable[Tensor], walked: set[Any]) -> Iterator[Tensor]:
    """Parameters that the graph of `tensors` reaches, past nodes walked before; those it walks are added to them."""
    ahead = [tensor.grad_fn for tensor in tensors]
    while ahead:
        node = ahead.pop()
        if node is None or node in walked:
            continue
        if hasattr(node, "variable"):
            yield node.variable  # not marked: a later site may use the same parameter
            continue
        walked.add(node)
        ahead.extend(each for each, _ in node.next_functions)
