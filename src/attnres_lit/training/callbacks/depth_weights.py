"""What each sublayer reads from depth, as a picture (arXiv 2603.15031, Fig. 8)."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from attnres_lit.inference.pictures import as_table, draw_weights
from attnres_lit.inference.watch import Rows, means, record
from attnres_lit.parallel.atomic import begin, commit
from attnres_lit.residual.base import Residual
from attnres_lit.training.module import LanguageModel


class DepthWeights(Callback):
    """Draws `depth/weights` at every validation of `fit`: sites x sources, the exit as the last row.

    Weights are means over the tokens and heads of the first validation batch of the logging process. TensorBoard gets
    the picture. The newest numbers are in `depth_weights.npz`: `weights` `(sites + 1, sources)`, NaN where a site does
    not read a source; `sites`, of which the exit is one more; `step`, the optimizer steps behind them. A strategy
    without depth attention has neither.

    Args:
        dirpath: folder of `depth_weights.npz`.
    """

    def __init__(self, dirpath: str) -> None:
        self.path = Path(dirpath) / "depth_weights.npz"
        self.rows: Rows | None = None
        self.recording = ExitStack()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the first batch."""
        assert isinstance(pl_module, LanguageModel)
        has_weights = type(pl_module.model.residual).weights is not Residual.weights
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if batch_idx == 0 and has_weights and in_training and not trainer.fast_dev_run:  # pyrefly: ignore[missing-attribute]
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
        """Draw and write it."""
        self.recording.close()
        assert isinstance(pl_module, LanguageModel)
        if self.rows is not None:
            parts = pl_module.runner.gather(means(self.rows))
            if trainer.is_global_zero:
                rows = dict(sorted((site, row) for part in parts for site, row in part.items()))
                image = draw_weights(rows)
                step = max(trainer.global_step - 1, 0)  # counted from 0, as Lightning does for the metrics beside it
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        logger.experiment.add_image("depth/weights", image, step, dataformats="HWC")
                self._write(rows, trainer.global_step)
        self.rows = None

    def _write(self, rows: Mapping[int, Mapping[int, float]], step: int) -> None:
        with begin(self.path).open("wb") as file:
            np.savez(file, weights=as_table(rows), sites=list(rows), step=step)
            file.flush()
            os.fsync(file.fileno())
        commit(self.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.recording.close()
