"""The harness itself: results, failures, hangs, and many calls in a row."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from parallel.world import RankFailed, on_ranks
from training.tiny import Tokens, tiny_module, tiny_trainer


class Own:
    """Of this file: arguments and results may be anything that can be pickled."""

    def __init__(self, value):
        self.value = value


def total(start):
    x = torch.tensor(start.value + dist.get_rank())
    dist.all_reduce(x)
    return Own(x.item()), torch.get_num_threads()


def two_trainers(folder):
    losses = []
    for _ in range(2):
        trainer = tiny_trainer(folder, devices=dist.get_world_size(), strategy=DDPStrategy(), max_steps=2)
        trainer.fit(tiny_module(), Tokens())
        losses.append(trainer.callback_metrics["train/loss"].item())
    return trainer.global_rank, losses


def one_raises():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def one_hangs():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def one_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_results_by_rank():
    for size in (2, 4, 1):
        results = on_ranks(size, total, Own(10))
        assert [(own.value, threads) for own, threads in results] == [(sum(range(10, 10 + size)), 1)] * size


def test_trainers_one_after_the_other(tmp_path):
    (rank, losses), (other, same) = on_ranks(2, two_trainers, tmp_path)
    assert (rank, other) == (0, 1)
    assert losses == same
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("function", "said"),
    [(one_raises, "rank 1 of 2 raised\n(.|\n)*on purpose"), (one_dies, "rank 1 of 2 died with exit code 7")],
)
def test_a_rank_that_fails_is_reported_and_the_next_call_works(function, said):
    with pytest.raises(RankFailed, match=said):
        on_ranks(2, function)
    test_results_by_rank()


def test_a_hang_is_killed_and_says_where():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 hangs at(.|\n)*one_hangs"):
        on_ranks(2, one_hangs, timeout=3)
    assert time.monotonic() - start < 12
