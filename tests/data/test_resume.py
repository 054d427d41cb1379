"""Under a real Trainer, 20 steps see the same batches as some steps, a checkpoint, and a new run for the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from attnres_lit.data.datamodule import TokenDataModule
from data.words import Words

STEPS = 20

pytestmark = [  # of Lightning, about a short run in a folder used before
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset`"),
    pytest.mark.filterwarnings("ignore:`isinstance"),
]


class Recorder(LightningModule):
    """Trains nothing and keeps every batch, and the number of batches in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_batches: list[Tensor] = []
        self.val_batches: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.train_batches.append(batch.clone())
        return self.weight.sum()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.val_batches.append(batch.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(
    tmp_path: Path,
    steps: int,
    workers: int,
    batch_size: int,
    val_every: int | None,
    limit: int | float = 1.0,
    resume: str | None = None,
) -> Recorder:
    datamodule = TokenDataModule(
        Words(), root=str(tmp_path), seq_len=31, batch_size=batch_size, val_fraction=0.2, num_workers=workers
    )
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_train_batches=limit,
        limit_val_batches=0 if val_every is None else 2,
        val_check_interval=val_every or 1.0,
        check_val_every_n_epoch=None if val_every else 1,
        callbacks=[ModelCheckpoint(tmp_path / "checkpoints", f"{steps}", every_n_train_steps=steps, save_top_k=-1)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, datamodule, ckpt_path=resume, weights_only=True)
    recorder.epoch = int(trainer.num_training_batches)
    return recorder


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("batch_size", "epoch", "val_every", "limit"),
    [(8, 26, None, 1.0), (30, 7, None, 1.0), (30, 7, 3, 1.0), (21, 10, 4, 1.0), (8, 5, 5, 5)],
    ids=["mid-epoch", "over epochs", "with validation", "at an epoch's end", "at the end of a short epoch"],
)
def test_resumed_run_sees_the_batches_of_the_whole_run(
    tmp_path: Path, workers: int, batch_size: int, epoch: int, val_every: int | None, limit: int | float
):
    whole = run(tmp_path, STEPS, workers, batch_size, val_every, limit).train_batches
    if epoch < STEPS:
        assert not torch.equal(whole[0], whole[epoch])
    before = run(tmp_path, 10, workers, batch_size, val_every, limit).train_batches
    checkpoint = str(tmp_path / "checkpoints" / "10.ckpt")
    after = run(tmp_path, STEPS, workers, batch_size, val_every, limit, resume=checkpoint)
    assert len(before) == len(after.train_batches) == 10
    assert len(whole) == STEPS
    for expected, batch in zip(whole, before + after.train_batches, strict=True):
        assert torch.equal(expected, batch)
    if val_every:
        assert torch.equal(after.val_batches[0], after.val_batches[-2])


@pytest.mark.parametrize("cut", range(1, 16))
def test_every_cut_of_two_epochs(tmp_path: Path, cut: int):
    whole = run(tmp_path, STEPS, 0, 30, 3).train_batches
    run(tmp_path, cut, 0, 30, 3)
    after = run(tmp_path, STEPS, 0, 30, 3, resume=str(tmp_path / "checkpoints" / f"{cut}.ckpt")).train_batches
    assert len(after) == STEPS - cut
    for expected, batch in zip(whole[cut:], after, strict=True):
        assert torch.equal(expected, batch)
