"""What each sublayer reads from depth, as a picture (arXiv 2603.15031, Fig. 8)."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from attnres_lit.inference.pictures import draw_weights
from attnres_lit.inference.watch import Rows, means, record
from attnres_lit.residual.base import Residual
from attnres_lit.training.module import LanguageModel


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
            image = draw_weights(dict(sorted(rows.items())))
            step = max(trainer.global_step - 1, 0)  # counted from 0, as Lightning does for the metrics beside it
            for logger in _tensorboards(trainer):
                logger.experiment.add_image("depth/weights", image, step, dataformats="HWC")
        self.rows = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.recording.close()


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
