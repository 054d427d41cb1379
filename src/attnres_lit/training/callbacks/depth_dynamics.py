"""How large the residual and its gradient are along depth (arXiv 2603.15031, Fig. 5)."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from attnres_lit.inference.watch import Squares, observe, roots
from attnres_lit.training.module import LanguageModel


class DepthDynamics(Callback):
    """Logs `depth/output_rms/<layer>` and `depth/grad_norm/<layer>`, of the batch of the logging process.

    In a pipeline: of the batch of its pipeline.

    A chosen step is observed as `observe` says; the numbers of the training do not change.

    Args:
        every_n_steps: optimizer steps from one observed step to the next; the first step is one.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1")
        self.every_n_steps = every_n_steps
        self.step = 0
        self.values: Squares | None = None  # of an observed step; empty where this process ends no layer
        self.observing = ExitStack()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to observe, on a chosen step; of accumulated batches the last one counts."""
        self.step = trainer.global_step
        assert isinstance(pl_module, LanguageModel)
        if self.step % self.every_n_steps == 0:
            self.values = self.observing.enter_context(observe(*(part.residual for part in pl_module.runner.parts)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was observed, once the optimizer has stepped."""
        self.observing.close()
        if self.step == trainer.global_step or self.values is None:
            return
        assert isinstance(pl_module, LanguageModel)
        found = pl_module.runner.gather(roots(self.values))
        digits = len(str(pl_module.model.config.num_layers - 1))  # so that names sort by depth
        metrics = {f"depth/{name}/{layer:0{digits}}": v for each in found for (name, layer), v in each.items()}
        for logger in trainer.loggers:
            logger.log_metrics(dict(sorted(metrics.items())), step=self.step)
        self.values = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.observing.close()
