"""What happens in depth, seen through the seam while a model runs; none of its numbers change."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnres_lit.model.runner import Part
from attnres_lit.residual.base import Note, Residual, Sources

Rows = dict[int, dict[int, list[Tensor]]]  # by site and source, for every forward
Squares = dict[tuple[str, int], tuple[Any, int]]  # by name and layer


@contextmanager
def record(*parts: Part, keep: Callable[[Tensor], Tensor] = Tensor.mean) -> Generator[Rows]:
    """Depth-attention weights of each site, in all forwards within; the exit is site `num_sites`.

    Args:
        parts: the parts of a model that run in this process.
        keep: what is kept of the weights of a source in a forward, `(B, T)`, or `(B, T, H)` with H heads.

    Returns:
        `{site: {source: weights}}`, filled as the passes go, for `means`. Sources are counted in the order in which the
        model makes them, the embedding first; a partial has the number of the source that it will become.
    """
    rows: Rows = {}
    for part in parts:
        _watch(part, rows, keep)
    try:
        yield rows
    finally:
        for part in parts:
            del part.residual.read, part.residual.exit


def _watch(part: Part, rows: Rows, keep: Callable[[Tensor], Tensor]) -> None:
    residual, read, exit = part.residual, part.residual.read, part.residual.exit
    known: list[Tensor | None] = []

    def look(sources: Sources, site: int) -> None:
        if site == part.first_site:
            known[:] = [None] * part.known
            for number, source in zip(part.sources, sources.done, strict=False):
                known[number] = source
        known.extend(source for source in sources.done if not any(source is each for each in known))
        at = [next(i for i, each in enumerate(known) if each is source) for source in sources.done]
        if sources.partial is not None:
            at.append(len(known))
        weights = residual.weights(sources, site)
        if weights is not None:
            row = rows.setdefault(site, {})
            for number, weight in zip(at, weights.float(), strict=True):
                row.setdefault(number, []).append(keep(weight))

    def read_and_look(sources: Sources, site: int) -> tuple[Tensor, Note]:
        look(sources, site)
        return read(sources, site)

    def exit_and_look(sources: Sources) -> Tensor:
        look(sources, residual.num_sites)
        return exit(sources)

    residual.read, residual.exit = read_and_look, exit_and_look


def means(rows: Rows) -> dict[int, dict[int, float]]:
    """The mean weight of every source at every site."""
    return {site: {at: torch.stack(w).mean().item() for at, w in row.items()} for site, row in rows.items()}


@contextmanager
def observe(*residuals: Residual) -> Generator[Squares]:
    """Sums of squares of the residual, and of its gradient, after each layer, in all forwards and backwards within.

    Of the partial or, where the layer has just closed a block, of the source that it became (Full AttnRes: the newest
    source); with streams, of their mean, whose gradient is the sum of theirs.

    Args:
        residuals: the parts of a residual that run in this process.

    Returns:
        `{(name, layer): (sum of squares, elements)}`, filled as the passes go, for `roots`.
    """
    squares: Squares = {}

    def add(name: str, layer: int, x: Tensor) -> None:
        before, count = squares.get((name, layer), (0.0, 0))
        squares[name, layer] = before + norm(x) ** 2, count + x.numel()

    def watch(residual: Residual) -> None:
        write = residual.write

        def observed(sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
            sources = write(sources, output, site, note)
            layer, is_last_of_layer = divmod(site, 2)
            if is_last_of_layer:
                newest = sources.done[-1] if sources.partial is None else sources.partial
                with_streams = newest.dim() > output.dim()
                add("output_rms", layer, newest.detach().mean(-2) if with_streams else newest.detach())
                if newest.requires_grad:  # not in the first pass of reentrant activation checkpointing
                    newest.register_hook(lambda grad: add("grad_norm", layer, grad.sum(-2) if with_streams else grad))
            return sources

        residual.write = observed

    for residual in residuals:
        watch(residual)
    try:
        yield squares
    finally:
        for residual in residuals:
            del residual.write


def roots(squares: Squares) -> dict[tuple[str, int], float]:
    """Root mean squares of outputs and norms of gradients, the latter over the whole `(B, T, D)`."""
    means = [total / count if name == "output_rms" else total for (name, _), (total, count) in squares.items()]
    return dict(zip(squares, torch.stack(means).sqrt().tolist(), strict=True)) if means else {}  # one transfer for all


def norm(x: Tensor) -> Tensor:
    """Euclidean norm, summed in at least fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
