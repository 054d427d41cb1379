"""Short trainings to compare: one process, or several that share a strategy."""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from attnres_lit.parallel import FullyShardedStrategy, PipelineStrategy
from attnres_lit.training import OptimConfig
from parallel.world import on_ranks
from residual.models import CONFIGS, factory_from_yaml
from training.tiny import BATCH, TOKENS, Tokens, tiny_config, tiny_module, tiny_trainer

STEPS = 20
ALONE = {}  # results of `alone`
OPTIONS = {"block": {"block_size": 3}, "full_window": {"window": 3}}  # those of the files are as Full at 6 sites
STRATEGIES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


class Shares(Tokens):
    """Rank r of R takes every R-th batch, from the r-th on: together, the batches of one process that accumulates R."""

    def __init__(self, batches=24, batch_size=BATCH):
        super().__init__(batches * batch_size // BATCH)
        self.batch_size, self.seq_len = batch_size, TOKENS

    def train_dataloader(self):
        sampler = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        mine = self.rows.unflatten(0, (-1, self.batch_size))[sampler["rank"] :: sampler["num_replicas"]]
        return DataLoader(mine.flatten(0, 1), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.rows[: 2 * self.batch_size], batch_size=self.batch_size)


class Result(NamedTuple):
    """Of a training: what must not depend on how it was spread."""

    losses: list[float]  # of every batch
    gradients: dict[str, torch.Tensor]  # of the first step, whole, before clipping
    norms: list[float]  # of the gradient, as logged, at every step
    parameters: dict[str, torch.Tensor]  # whole, after the last step


class Record(Callback):
    def __init__(self):
        self.losses, self.gradients, self.norms = [], {}, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.gradients:
            self.gradients = {name: whole(p.grad) for name, p in pl_module.model.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)  # Lightning has divided it
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.norms.append(trainer.callback_metrics["grad_norm"].item())


def whole(tensor):
    """A copy of all of it, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    folder,
    residual,
    strategy="auto",
    steps=STEPS,
    accumulate=1,
    meta=False,
    callbacks=(),
    trainer=None,
    optimizer="adamw",
    **model,
):
    """Train a tiny model by `strategy`: auto, ddp, fsdp, or the options of a pipeline, on the ranks there are."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    replicas, batch_size = size, BATCH
    if strategy == "fsdp":
        strategy = FullyShardedStrategy()
    elif isinstance(strategy, dict):
        replicas = size // strategy.get("pipeline_parallel_size", size)
        batch_size *= strategy["num_microbatches"]
        strategy = PipelineStrategy(**strategy)
    record = Record()
    options = {"gradient_clip_val": 0.5, "use_distributed_sampler": False} | (trainer or {})
    fit = tiny_trainer(
        folder,
        strategy=strategy,
        devices=size,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        callbacks=[record, *callbacks],
        **options,
    )
    model = {"config": tiny_config(num_layers=3)} | model
    with torch.device("meta") if meta else nullcontext():
        module = tiny_module(
            partial(factory_from_yaml(CONFIGS / f"{residual}.yaml"), **OPTIONS.get(residual, {})),
            # with a smaller eps, Adam blows up the rounding of gradients that are almost nothing, as mHC has at first
            optim=OptimConfig(lr=1e-2, eps=1e-6, warmup_steps=4, total_steps=STEPS, optimizer=optimizer),
            **model,
        )
    fit.fit(module, Shares(steps * accumulate * replicas, batch_size))
    return Result(
        record.losses,
        record.gradients,
        record.norms,
        {name: whole(parameter) for name, parameter in module.model.named_parameters()},
    )


def alone(folder, residual, accumulate, **options):
    """`train` in this process, once, which accumulates what several ranks would share."""
    key = repr((folder, residual, accumulate, options))
    if key not in ALONE:
        ALONE[key] = train(folder, residual, accumulate=accumulate, **options)
    return ALONE[key]


def on_several(size, folder, residual, strategy, **options):
    """`train` on several ranks, as if one process had seen every batch in turn."""
    return interleaved(on_ranks(size, train, folder, residual, strategy, **options))


def interleaved(results):
    """Of the results of all ranks one, with the losses in the order in which one process would have them."""
    losses = [loss for of_step in zip(*(each.losses for each in results), strict=True) for loss in of_step]
    assert all(each.norms == results[0].norms for each in results), "a norm must be the same everywhere"
    return results[0]._replace(losses=losses)


def pipelined(size, folder, residual, accumulate=1, **options):
    """A training by a pipeline on `size` ranks, as one, and what it must equal: one process, a microbatch at a time."""
    names = ("steps", "trainer", "config", "optimizer")
    shared = {"config": tiny_config(num_layers=8)} | {name: options.pop(name) for name in names if name in options}
    model = {name: options.pop(name) for name in ("meta", "checkpoint_activations", "compile") if name in options}
    strategy = {"num_microbatches": 4} | options
    replicas = size // strategy.get("pipeline_parallel_size", size)
    results = on_ranks(size, train, folder, residual, strategy, accumulate=accumulate, **shared, **model)
    merged = interleaved(results[:replicas])
    for each in results[1:]:
        merged.gradients.update(each.gradients)
        merged.parameters.update(each.parameters)
    microbatches = strategy["num_microbatches"]
    expected = alone(folder, residual, accumulate * replicas * microbatches, **shared)
    losses = torch.tensor(expected.losses).unflatten(0, (-1, microbatches)).mean(-1)
    return merged, expected._replace(losses=losses.tolist())


def differences(result, expected):
    """Largest difference of a loss; of a gradient and of a parameter, relative to its norm or, below 1e-6, absolute."""
    losses = max(abs(a - b) for a, b in zip(result.losses, expected.losses, strict=True))
    return losses, _farthest(result.gradients, expected.gradients), _farthest(result.parameters, expected.parameters)


def assert_same_training(result, expected):
    losses, gradients, parameters = differences(result, expected)
    assert losses < 2e-6
    assert gradients < 1e-5
    assert parameters < 5e-5
    assert result.norms == pytest.approx(expected.norms, rel=5e-5)


def fast(*chosen):
    """Every strategy on 2 and 4 ranks; those not among `chosen` are slow tests."""
    every = [(residual, size) for residual in STRATEGIES for size in (2, 4)]
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        ("residual", "size"), [pytest.param(*each, marks=marks[each in chosen]) for each in every]
    )


def _farthest(tensors, expected):
    assert tensors.keys() == expected.keys()
    distances = []
    for name, tensor in tensors.items():
        norm = expected[name].norm().item()
        distances.append((tensor - expected[name]).norm().item() / (norm if norm > 1e-6 else 1.0))
    return max(distances)
