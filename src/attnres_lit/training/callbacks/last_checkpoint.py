"""`last.ckpt`: where `--ckpt_path last` continues."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


class LastCheckpoint(Checkpoint):
    """Keeps one checkpoint of the newest state: every n steps, after every validation, and at the end.

    Where a validation is due it is saved after it, with what the other callbacks learned there: who goes on from it
    misses no validation. A run killed while writing keeps the checkpoint before; on one device and with DDP,
    `CheckpointFiles` sees to that.

    Args:
        dirpath: folder of `last.ckpt`.
        every_n_steps: optimizer steps between two saves.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1")
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_steps = every_n_steps
        self._saved_at = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when n steps have passed, unless validation comes next."""
        due = trainer.global_step % self.every_n_steps == 0 and trainer.global_step != self._saved_at
        fit = trainer.fit_loop
        if due and not fit.epoch_loop._should_check_val_fx(fit._data_fetcher):  # pyrefly: ignore[bad-argument-type]
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what validation changed in the other callbacks."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end, unless it has just been saved."""
        if trainer.global_step != self._saved_at:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # pyrefly: ignore[missing-attribute]
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at = trainer.global_step
