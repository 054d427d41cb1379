"""What each sublayer reads from depth, as a picture (arXiv 2603.15031, Fig. 8)."""

import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from attnres_lit.model.runner import Part
from attnres_lit.residual.base import Note, Residual, Sources
from attnres_lit.training.module import LanguageModel

Rows = dict[int, dict[int, list[Tensor]]]


class DepthWeights(Callback):
    """Draws `depth/weights` at every validation: sites x sources, the exit as the last row.

    Weights are means over the tokens and heads of the first validation batch of the logging process. Only TensorBoard
    takes the image; with another logger, or a strategy without depth attention, nothing happens.
    """

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.recording = ExitStack()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the first batch."""
        assert isinstance(pl_module, LanguageModel)
        has_weights = type(pl_module.model.residual).weights is not Residual.weights
        if batch_idx == 0 and has_weights and not trainer.sanity_checking and _tensorboards(trainer):
            self.rows = self.recording.enter_context(record(*pl_module.runner.parts))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw it."""
        self.recording.close()
        assert isinstance(pl_module, LanguageModel)
        if self.rows is not None:
            rows = {site: row for part in pl_module.runner.gather(means(self.rows)) for site, row in part.items()}
            image = draw(dict(sorted(rows.items())))
            step = max(trainer.global_step - 1, 0)  # counted from 0, as Lightning does for the metrics beside it
            for logger in _tensorboards(trainer):
                logger.experiment.add_image("depth/weights", image, step, dataformats="HWC")
        self.rows = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.recording.close()


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


@contextmanager
def record(*parts: Part) -> Generator[Rows]:
    """Depth-attention weights of each site, summed over all forwards within; the exit is site `num_sites`.

    Args:
        parts: the parts of a model that run in this process.

    Returns:
        `{site: {source: weights}}`, filled as the passes go, for `means`. Sources are counted in the order in which the
        model makes them, the embedding first; a partial has the number of the source that it will become.
    """
    rows: Rows = {}
    for part in parts:
        _watch(part, rows)
    try:
        yield rows
    finally:
        for part in parts:
            del part.residual.read, part.residual.exit


def _watch(part: Part, rows: Rows) -> None:
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
            for number, weight in zip(at, weights.float().flatten(1).mean(1), strict=True):
                row.setdefault(number, []).append(weight)

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


def draw(rows: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """A heat map of `{site: {source: weight}}`, the last site being the exit: uint8 `(height, width, 3)`."""
    sources = 1 + max(at for row in rows.values() for at in row)
    table = np.full((len(rows), sources), np.nan)
    for y, row in enumerate(rows.values()):
        for at, weight in row.items():
            table[y, at] = weight
    *sites, _ = rows
    width, height = min(2.6 + 0.26 * sources, 14), min(1.2 + 0.22 * len(rows), 12)  # inches
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    # the root tells small weights apart: over n sources, a uniform row has 1 / n
    image = axes.imshow(table, norm=PowerNorm(0.5, 0, 1), cmap="viridis", aspect="auto", interpolation="none")
    _label(axes.set_yticks, [f"{site} {'MLP' if site % 2 else 'attn'}" for site in sites] + ["exit"])
    _label(axes.set_xticks, ["emb", *map(str, range(1, sources))])
    axes.set_xlabel("source")
    axes.set_ylabel("site")
    axes.set_title("mean depth-attention weight", fontsize=9)
    figure.colorbar(image, ax=axes, ticks=[0, 0.02, 0.1, 0.25, 0.5, 1])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _label(set_ticks: Any, labels: list[str]) -> None:
    every = math.ceil(len(labels) / 40)
    shown = sorted({*range(0, len(labels), every), len(labels) - 1})
    set_ticks(shown, [labels[i] for i in shown], fontsize=7)
