"""A Trainer does with a pipeline what it does on one device: evaluation, callbacks, the block cache."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from attnres_lit.parallel import BlockCacheCallback, PipelineStrategy
from attnres_lit.parallel.block_cache import BlockCache
from attnres_lit.residual import MHC, BlockAttnRes, FullAttnRes, PreNorm
from attnres_lit.training.callbacks import DepthDynamics, DepthWeights, depth_weights
from parallel.runs import Shares
from parallel.world import RankFailed, on_ranks
from training.tiny import BATCH, tiny_config, tiny_module, tiny_trainer

MICROBATCHES = 4


class Data(Shares):
    def __init__(self, batches=3):
        super().__init__(batches, BATCH * MICROBATCHES)

    test_dataloader = predict_dataloader = Shares.val_dataloader


def setup(folder, residual, pipeline, **options):
    size = dist.get_world_size() if pipeline else 1
    strategy = PipelineStrategy(num_microbatches=MICROBATCHES, **pipeline) if pipeline else "auto"
    options = {"max_steps": 3, "use_distributed_sampler": False, "limit_val_batches": None} | options
    module = tiny_module(residual, config=tiny_config(num_layers=4))
    return tiny_trainer(folder, strategy=strategy, devices=size, **options), module


class Logged(Callback):
    """What the depth callbacks found: scalars, and the tables that the pictures are drawn from."""

    def __init__(self):
        self.scalars, self.tables = {}, []

    def setup(self, trainer, pl_module, stage):
        def table(rows):
            self.tables.append(rows)
            return np.zeros((2, 2, 3), np.uint8)

        depth_weights.draw_weights = table
        for logger in trainer.loggers:
            logger.log_metrics = lambda metrics, step: self.scalars.update({(k, step): v for k, v in metrics.items()})


def evaluate(folder, residual, pipeline):
    logged = Logged()
    callbacks = [logged, DepthDynamics(every_n_steps=1), DepthWeights(folder)]
    logger = TensorBoardLogger(folder, name="", version=str(bool(pipeline)))
    trainer, module = setup(folder, residual, pipeline, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    trainer.fit(module, Data())
    depth = {key: value for key, value in logged.scalars.items() if key[0].startswith("depth/")}
    trainer.validate(module, Data(), verbose=False)
    losses = [trainer.callback_metrics["val/loss"].item()]
    trainer.test(module, Data(), verbose=False)
    losses.append(trainer.callback_metrics["test/loss"].item())
    predictions = torch.cat(trainer.predict(module, Data()))
    return losses, predictions, depth, logged.tables


@pytest.mark.parametrize("residual", [BlockAttnRes, MHC])
def test_evaluation_and_depth_callbacks(residual, tmp_path):
    pipeline = {"schedule": "Interleaved1F1B", "virtual_stages": 2}
    (losses, predictions, depth, tables), other = on_ranks(2, evaluate, tmp_path, residual, pipeline)
    expected = evaluate(tmp_path, residual, None)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert losses == other[0]
    torch.testing.assert_close(predictions, expected[1], rtol=1e-4, atol=1e-5)
    assert predictions.equal(other[1])
    assert depth == pytest.approx(expected[2], rel=1e-4)
    assert len(depth) == 3 * 2 * 4  # steps, kinds, layers
    assert len(tables) == len(expected[3]) == (residual is BlockAttnRes)  # after the fit
    for table, wanted in zip(tables, expected[3], strict=True):
        assert list(table) == list(wanted) == list(range(9))  # every site, and the exit
        for site, row in table.items():
            assert row == pytest.approx(wanted[site], rel=1e-4), site


def observe(folder, pipeline):
    trainer, module = setup(folder, BlockAttnRes, pipeline, callbacks=[DepthDynamics(every_n_steps=1)])
    trainer.fit(module, Data())


def test_a_rank_where_no_layer_ends(tmp_path):
    """It has nothing to log, and must not leave the others waiting."""
    on_ranks(2, observe, tmp_path, {"schedule": "Interleaved1F1B", "virtual_stages": 4}, timeout=60)


class Raises(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        trainer.strategy.cache.open()
        trainer.strategy.cache.put(0, 0, torch.ones(2))
        raise ValueError("on purpose")


class Leaves(Callback):
    """An entry that no backward will take."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        trainer.strategy.cache.put(1, 2, torch.ones(2))


def fail(folder, callback, message):
    pipeline = {"schedule": "Interleaved1F1B", "virtual_stages": 2}
    trainer, module = setup(folder, BlockAttnRes, pipeline, callbacks=[callback()])
    with pytest.raises((ValueError, RuntimeError), match=message):
        trainer.fit(module, Data())
    return len(trainer.strategy.cache.values)


def test_an_exception_clears_the_cache(tmp_path):
    assert on_ranks(2, fail, tmp_path, Raises, "on purpose") == [0, 0]


def test_an_entry_that_outlives_its_microbatch_is_an_error(tmp_path):
    on_ranks(2, fail, tmp_path, Leaves, "1 cached sources outlived their microbatch: source 2 of microbatch 1")


def test_the_callback_belongs_to_a_pipeline(tmp_path):
    trainer, module = setup(tmp_path, PreNorm, None, callbacks=[BlockCacheCallback()])
    with pytest.raises(ValueError, match="belongs to a PipelineStrategy"):
        trainer.fit(module, Data())


def test_a_closed_cache_takes_nothing():
    with pytest.raises(RuntimeError, match="closed"):
        BlockCache().put(0, 0, torch.ones(2))


def start(folder, residual, pipeline, config):
    strategy = PipelineStrategy(**pipeline)
    trainer = tiny_trainer(folder, strategy=strategy, devices=dist.get_world_size(), use_distributed_sampler=False)
    trainer.fit(tiny_module(residual, config=tiny_config(num_layers=4, **config)), Data())


@pytest.mark.parametrize(
    ("residual", "pipeline", "config", "message"),
    [
        (PreNorm, {"num_microbatches": 5}, {}, "num_microbatches=5 must divide the batch, 16 sequences"),
        (PreNorm, {"pipeline_parallel_size": 3}, {}, "pipeline_parallel_size=3 must divide the number of processes, 2"),
        (PreNorm, {}, {"tie_embeddings": True}, "tied embeddings"),
        (FullAttnRes, {"split_points": [2, 4]}, {}, "split_points=\\[2, 4\\] must be 1 increasing sites"),
        (
            partial(BlockAttnRes, block_size=2, two_phase=True),
            {"fully_shard": True, "split_points": [3]},
            {},
            "fully_shard=true needs every parameter in one stage: BlockAttnRes uses its (query|key_gain)",
        ),
    ],
)
def test_wrong_settings(residual, pipeline, config, message, tmp_path):
    with pytest.raises(RankFailed, match=message):
        on_ranks(2, start, tmp_path, residual, pipeline, config)
