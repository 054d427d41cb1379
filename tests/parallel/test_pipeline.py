"""Pipelines train as one process does that takes the same microbatches in turn."""

import itertools

import pytest
import torch

from parallel.runs import STRATEGIES, assert_same_training, pipelined
from training.tiny import tiny_config

SINGLE, SEVERAL = ("GPipe", "1F1B"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
SETTINGS = [
    *((schedule, 1, "auto") for schedule in (*SINGLE, *SEVERAL)),
    *itertools.product(SEVERAL, (2, 4), ("auto", False)),
]
FAST = {
    ("block", 2, "Interleaved1F1B", 2, "auto"),
    ("block", 4, "InterleavedZeroBubble", 4, "auto"),
    ("full", 2, "InterleavedZeroBubble", 2, "auto"),
    ("full_window", 2, "Interleaved1F1B", 4, "auto"),
    ("denseformer", 2, "LoopedBFS", 2, "auto"),
    ("mhc", 4, "1F1B", 1, "auto"),
    ("prenorm", 2, "GPipe", 1, "auto"),
}
FIVE = ("prenorm", "denseformer", "mhc", "full", "block")
EVERY = [(residual, size, *setting) for residual in FIVE for size in (2, 4) for setting in SETTINGS]
EVERY += [(residual, 2, "Interleaved1F1B", 4, "auto") for residual in STRATEGIES if residual not in FIVE]


def steps(residual):
    """Some variants blow up what differs by rounding: the matrices of input queries to 1e-2 in 20 steps of Adam."""
    return 20 if residual in FIVE else 5


@pytest.fixture
def folder(tmp_path_factory):
    """One for all tests, so that they share what one process does."""
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize(
    ("residual", "size", "schedule", "virtual_stages", "cache_blocks"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in EVERY],
)
def test_equals_one_process(residual, size, schedule, virtual_stages, cache_blocks, folder):
    options = {"schedule": schedule, "virtual_stages": virtual_stages, "cache_blocks": cache_blocks}
    assert_same_training(*pipelined(size, folder, residual, steps=steps(residual), **options))


INTERLEAVED = {"schedule": "Interleaved1F1B", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("residual", "fully_shard"),
    [
        pytest.param(each, shard, marks=() if (each, shard) in {("block", True), ("mhc", False)} else pytest.mark.slow)
        for each in STRATEGIES
        for shard in (False, True)
    ],
)
def test_replicas(residual, fully_shard, folder):
    """2 x 2: two replicas of a pipeline of two ranks, built on meta."""
    options = {"pipeline_parallel_size": 2, "fully_shard": fully_shard, "meta": True, "steps": steps(residual)}
    assert_same_training(*pipelined(4, folder, residual, **INTERLEAVED, **options))


def test_accumulated_batches(folder):
    assert_same_training(*pipelined(2, folder, "block", accumulate=2, steps=5, **INTERLEAVED))


def test_validation_in_between(folder):
    """From training to validation and back: the shapes of what is sent stay, gradients come and go."""
    trainer = {"limit_val_batches": 2, "val_check_interval": 2, "gradient_clip_val": 0.5}
    assert_same_training(*pipelined(2, folder, "full", steps=6, trainer=trainer, **INTERLEAVED))


def test_the_first_loss_with_and_without_the_cache(folder):
    kept, _ = pipelined(2, folder, "block", steps=2, **INTERLEAVED)
    sent, _ = pipelined(2, folder, "block", steps=2, cache_blocks=False, **INTERLEAVED)
    assert kept.losses[0] == sent.losses[0]


@pytest.mark.parametrize("again", ["read", True])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_recomputed_activations(again, schedule, folder):
    options = {"schedule": schedule, "virtual_stages": 2, "steps": 5}
    assert_same_training(*pipelined(2, folder, "block", checkpoint_activations=again, **options))


def test_layers_of_unequal_width(folder):
    """Cut by cost: the first of two ranks has 14 of 16 sites."""
    config = tiny_config(num_layers=8, hidden_dim=[8, 8, 8, 8, 8, 8, 96, 200])
    assert_same_training(*pipelined(2, folder, "block", steps=5, config=config))


def test_split_points(folder):
    assert_same_training(*pipelined(2, folder, "block", steps=5, split_points=[1, 2, 9], **INTERLEAVED))


def test_mixed_precision(folder):
    """As close as the order in which bf16 gradients are added up allows."""
    trainer = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    result, expected = pipelined(2, folder, "block", steps=5, trainer=trainer, **INTERLEAVED)
    assert result.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)
    assert result.norms == pytest.approx(expected.norms, rel=1e-2)
    assert {value.dtype for value in result.gradients.values()} == {torch.float32}
