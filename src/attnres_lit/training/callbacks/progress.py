"""The progress bar: the loss and tokens per second, under short names."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar without the version of the logger."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if (loss := metrics.pop("train/loss", None)) is not None:
            metrics["loss"] = loss
        if isinstance(speed := metrics.pop("throughput/tokens_per_sec", None), float):
            metrics["tokens/s"] = round(speed)
        return metrics
