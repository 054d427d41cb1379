"""Tokens per second."""

from collections import deque
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class Throughput(Callback):
    """Logs `throughput/tokens_per_sec` of all data-parallel ranks together, validation not counted as time.

    Args:
        window: batches it is the mean of, so that neither start-up nor one slow batch shows for long.

    Raises:
        ValueError: `window` below 1.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ValueError(f"window={window} must be at least 1")
        self.marks: deque[tuple[float, int]] = deque(maxlen=window + 1)  # seconds and tokens of this rank so far
        self.idle = 0.0  # seconds spent in validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.idle = 0.0
        self.marks.clear()
        self.marks.append((perf_counter(), 0))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        """Log the mean over the window; the tokens of a batch are those the model is asked for."""
        self.marks.append((perf_counter() - self.idle, self.marks[-1][1] + batch[:, 1:].numel()))
        (start, before), (end, after) = self.marks[0], self.marks[-1]
        sampler = trainer.distributed_sampler_kwargs  # the strategy knows which processes share their data
        ranks = sampler["num_replicas"] if sampler else 1
        pl_module.log("throughput/tokens_per_sec", ranks * (after - before) / (end - start), prog_bar=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.idle -= perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start it again."""
        self.idle += perf_counter()
