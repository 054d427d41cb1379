"""Data parallelism with whole replicas: several processes train as one that accumulates their batches."""

from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from attnres_lit.data.datamodule import TokenDataModule
from data.test_resume import Recorder
from data.words import Words
from parallel.runs import alone, assert_same_training, fast, on_several
from parallel.world import on_ranks


@fast(("block", 2), ("mhc", 2), ("denseformer", 4))
def test_equals_one_process(residual, size, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    assert_same_training(on_several(size, folder, residual, "ddp"), alone(folder, residual, size))


def test_from_meta_and_recomputed(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    result = on_several(2, folder, "full", "ddp", meta=True, checkpoint_activations=True)
    assert_same_training(result, alone(folder, "full", 2))


def watch(folder, steps, resume=None):
    """Train nothing on the batches of the data module; returns them, and what validation saw."""
    data = TokenDataModule(Words(), root=folder, seq_len=31, batch_size=8, val_fraction=0.2)
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_steps=steps,
        limit_val_batches=2,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        callbacks=[ModelCheckpoint(Path(folder) / "checkpoints", f"{steps}", every_n_train_steps=steps, save_top_k=-1)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, data, ckpt_path=resume, weights_only=True)
    return torch.stack(recorder.train_batches), torch.stack(recorder.val_batches)


def test_ranks_read_disjoint_batches_and_resume_on_the_next(tmp_path):
    whole = on_ranks(2, watch, str(tmp_path), 18)  # 13 batches are an epoch
    (train, val), (other_train, other_val) = whole
    for mine, others in ((train[:13], other_train[:13]), (val[:2], other_val[:2])):
        blocks = [{tuple(row) for row in each.flatten(0, 1).tolist()} for each in (mine, others)]
        assert len(blocks[0]) == len(blocks[1]) == mine.shape[0] * mine.shape[1]
        assert not blocks[0] & blocks[1]
    on_ranks(2, watch, str(tmp_path), 10)
    resumed = on_ranks(2, watch, str(tmp_path), 18, str(tmp_path / "checkpoints/10.ckpt"))
    for (before, _), (after, _) in zip(whole, resumed, strict=True):
        assert after.equal(before[10:])
