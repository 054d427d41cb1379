"""Tokens per second, and the share of the devices' peak that the model makes of them."""

from collections import deque
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from attnres_lit.parallel.cost_model import flops
from attnres_lit.training.module import LanguageModel

# FLOP/s of dense bf16 products, as the makers give them (Lightning's table mixes them with those of sparse ones); of
# names that contain one another the longest counts
PEAKS = {
    "A100": 312e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989.4e12,
    "B200": 2250e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "MI300X": 1307.4e12,
}


class Throughput(Callback):
    """Logs `throughput/tokens_per_sec` of all data-parallel ranks together, validation not counted as time.

    Where the peak of the devices is known, also `throughput/mfu`, the model FLOPs utilisation: the FLOPs of these
    tokens, forward and backward, over what all devices could do in that time. Counted are the products of the sublayers
    and the head (`model/flops.py`), neither what is computed again in backward nor the residual's own work.

    Args:
        window: batches it is the mean of, so that neither start-up nor one slow batch shows for long.
        peak_flops: FLOP/s of one device; null: that of a known GPU, for dense bf16 products.

    Raises:
        ValueError: `window` below 1, or `peak_flops` not above 0.
    """

    def __init__(self, window: int = 20, peak_flops: float | None = None) -> None:
        if window < 1:
            raise ValueError(f"window={window} must be at least 1")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops} must be above 0, or null")
        self.peak_flops = peak_flops
        self.peak: float | None = None
        self.marks: deque[tuple[float, int]] = deque(maxlen=window + 1)  # seconds and tokens of this rank so far
        self.idle = 0.0  # seconds spent in validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.peak = self.peak_flops or peak_of(pl_module.device)
        self.idle = 0.0
        self.marks.clear()
        self.marks.append((perf_counter(), 0))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        """Log the mean over the window; the tokens of a batch are those the model is asked for."""
        assert isinstance(pl_module, LanguageModel)
        targets = batch[:, 1:]
        self.marks.append((perf_counter() - self.idle, self.marks[-1][1] + targets.numel()))
        (start, before), (end, after) = self.marks[0], self.marks[-1]
        sampler = trainer.distributed_sampler_kwargs  # the strategy knows which processes share their data
        ranks = sampler["num_replicas"] if sampler else 1
        rate = ranks * (after - before) / (end - start)
        pl_module.log("throughput/tokens_per_sec", rate, prog_bar=True)
        if self.peak is not None:
            per_token = flops(pl_module.model.config, targets.shape[1], again=False).training
            pl_module.log("throughput/mfu", rate * per_token / (self.peak * trainer.world_size))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.idle -= perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start it again."""
        self.idle += perf_counter()


def peak_of(device: torch.device) -> float | None:
    """Peak FLOP/s of a device, None if it is not known."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    words = set(name.replace("-", " ").split())
    known = [each for each in PEAKS if set(each.lower().split()) <= words]
    return PEAKS[max(known, key=len)] if known else None
