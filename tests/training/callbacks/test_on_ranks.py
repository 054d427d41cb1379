"""What the callbacks report from several processes is what they would report from one, and none waits for another."""

import csv

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from attnres_lit.parallel import FullyShardedStrategy
from attnres_lit.training.callbacks import DepthDynamics, DepthWeights, Predictions, Throughput
from parallel.runs import Shares
from parallel.world import on_ranks
from training.tiny import BATCH, TOKENS, tiny_config, tiny_module, tiny_trainer

STRATEGIES = {"auto": "auto", "ddp": "ddp", "fsdp": FullyShardedStrategy}


class Data(Shares):
    """The validation split dealt out in turn as well, and the first rank's first batch that of a single process."""

    def val_dataloader(self):
        sampler = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(self.rows[: 4 * BATCH][sampler["rank"] :: sampler["num_replicas"]], batch_size=BATCH)


def watched(folder, strategy):
    size = dist.get_world_size() if dist.is_initialized() else 1
    named = STRATEGIES[strategy]
    trainer = tiny_trainer(
        folder,
        strategy=named if isinstance(named, str) else named(),
        devices=size,
        max_steps=2,
        accumulate_grad_batches=1,
        use_distributed_sampler=False,
        logger=[TensorBoardLogger(folder, name="", version=""), CSVLogger(folder, name="csv", version="")],
        callbacks=[Throughput(), DepthDynamics(every_n_steps=1), DepthWeights(folder), Predictions(folder)],
        val_check_interval=2,
        limit_val_batches=None,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
    )
    module = tiny_module(config=tiny_config(num_layers=3))
    data = Data(batches=4)
    trainer.fit(module, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    trainer.predict(module, data)
    return metrics


def reported(folder):
    events = EventAccumulator(str(folder), {"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("depth/weights")] == [1]
    with open(folder / "csv/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    depth = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0] if name.startswith("depth/")}
    return events.Images("depth/weights")[0].encoded_image_string, depth, rows


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_from_two_ranks(strategy, tmp_path):
    alone, several = tmp_path / "alone", tmp_path / "several"
    watched(alone, "auto")
    metrics, same = on_ranks(2, watched, several, strategy)
    assert metrics == same
    assert set(metrics) == {"val/loss", "val/ppl"}

    _, expected, _ = reported(alone)
    _, depth, rows = reported(several)
    assert depth.keys() == expected.keys()
    assert len(depth) == 2 * 3
    for name, values in depth.items():
        assert len(values) == 2
        assert values[0] == pytest.approx(expected[name][0], rel=1e-5)  # of the batch that the first rank has
    assert all(float(row["throughput/tokens_per_sec"]) > 0 for row in rows if row["train/loss"])

    parts = [torch.load(several / f"predictions{rank}.pt", weights_only=True) for rank in ("", ".1")]
    assert [tuple(part.shape) for part in parts] == [(2 * BATCH, TOKENS)] * 2
    nats = -torch.cat(parts).mean().item()  # of the whole split, by the final weights, as validation was
    assert metrics["val/loss"] == pytest.approx(nats, rel=1e-6)
