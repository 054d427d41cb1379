"""What `predict` leaves: the log-probability of every token of the split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from attnres_lit.training.module import LanguageModel


class Predictions(BasePredictionWriter):
    """Writes `predictions.pt` (`predictions.<i>.pt` of data-parallel rank i): fp32 `(blocks, T)`, in nats.

    Args:
        dirpath: the folder.
    """

    def __init__(self, dirpath: str) -> None:
        super().__init__("epoch")
        self.dirpath = Path(dirpath)

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """One file a share of the data, blocks in the order of the split."""
        assert isinstance(pl_module, LanguageModel)
        if not pl_module.runner.is_first:
            return
        self.dirpath.mkdir(parents=True, exist_ok=True)
        sampler = trainer.distributed_sampler_kwargs
        rank = f".{sampler['rank']}" if sampler and sampler["rank"] else ""
        torch.save(torch.cat([batch.cpu() for batch in predictions]), self.dirpath / f"predictions{rank}.pt")
