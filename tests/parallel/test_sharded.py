"""Runs under Lightning that are broken off, and continued in any layout of processes."""

import os
import shutil
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from attnres_lit import PreNorm
from attnres_lit.parallel.checkpoint import describe, read_full
from attnres_lit.parallel.pipeline import PipelineStrategy
from attnres_lit.parallel.sharded import FullyShardedStrategy
from attnres_lit.parallel.storage import numbers
from attnres_lit.training.callbacks import LastCheckpoint
from attnres_lit.training.checkpoint_io import CheckpointFiles
from parallel.world import RankFailed, on_ranks
from training.tiny import TOKENS, Tokens, tiny_module, tiny_trainer

STEPS = 4
FILES = ("one", "ddp")  # the others write folders
ORDER = ("params", "param_names", "fused")  # in which a layout happens to have its parameters
LAYOUTS = {
    "one": (1, lambda: "auto"),
    "ddp": (2, DDPStrategy),
    "fsdp": (2, FullyShardedStrategy),
    "pipeline": (2, lambda: PipelineStrategy(num_microbatches=2, schedule="Interleaved1F1B", virtual_stages=2)),
    "hybrid": (4, lambda: PipelineStrategy(pipeline_parallel_size=2, num_microbatches=2, fully_shard=True)),
}  # processes and strategy


class Losses(LastCheckpoint):
    """Keeps what a run says of itself, and `last.ckpt`."""

    def __init__(self, folder):
        super().__init__(folder, every_n_steps=2)
        self.losses, self.rates = {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.global_step - 1] = float(outputs["loss"])
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def state_dict(self):
        return {"seen": max(self.losses) + 1}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def run(layout, folder, steps, ckpt=None, **options):
    """Every process reads the same batches. Returns losses and learning rates by step."""
    callback, data = Losses(folder), Tokens()
    data.seq_len = TOKENS
    if ckpt is not None:
        data.taken = describe(ckpt)["global_step"]
    devices, strategy = LAYOUTS[layout]
    trainer = tiny_trainer(
        folder,
        max_steps=steps,
        devices=devices,
        strategy=strategy(),
        callbacks=callback,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        plugins=[CheckpointFiles()] if layout in FILES else [],
    )
    trainer.fit(tiny_module(**options), data, ckpt_path=ckpt)
    assert ckpt is None or callback.seen == data.taken
    return callback.losses, callback.rates


def on(layout, *args, **options):
    """`run` on as many processes as the layout has."""
    return on_ranks(LAYOUTS[layout][0], run, layout, *args, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each layout: the folder of a run that was broken off half way; and what a whole run says."""
    folder = tmp_path_factory.mktemp("runs")
    whole = run("one", folder / "whole", 2 * STEPS)
    for layout in LAYOUTS:
        on(layout, folder / layout, STEPS)
    return folder, whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_checkpoint_whoever_writes_it(layout, runs):
    """Names, shapes, settings and progress; values but for the order of sums."""
    path = runs[0] / layout / "last.ckpt"
    assert path.is_file() == (layout in FILES)
    one, found = read_full(runs[0] / "one/last.ckpt"), read_full(path)
    assert one.keys() == found.keys()
    for key in ("epoch", "global_step", "hyper_parameters", "loops", "lr_schedulers", "callbacks"):
        assert one[key] == found[key]
    assert one["state_dict"].keys() == found["state_dict"].keys()
    (a,), (b,) = (each["optimizer_states"] for each in (one, found))
    for saved, its in zip(a["param_groups"], b["param_groups"], strict=True):
        assert set(saved["param_names"]) == set(its["param_names"])
        assert {k: v for k, v in saved.items() if k not in ORDER} == {k: v for k, v in its.items() if k not in ORDER}
    ids, others = numbers(a["param_groups"]), numbers(b["param_groups"])
    for name, number in ids.items():
        torch.testing.assert_close(b["state"][others[name]], a["state"][number], rtol=1e-3, atol=1e-6)


def test_what_is_no_tensor_loads_safely(runs):
    rest = torch.load(runs[0] / "pipeline/last.ckpt/meta.pt", weights_only=True)
    assert rest["global_step"] == STEPS
    assert {"hyper_parameters", "loops", "callbacks", "lr_schedulers", "optimizer_states"} <= rest.keys()


FAST = {("one", "fsdp"), ("hybrid", "pipeline"), ("pipeline", "one")}


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow) for pair in permutations(LAYOUTS, 2)],
)
def test_a_run_continues_in_another_layout(before, after, runs, tmp_path):
    """With the losses and learning rates of the whole run; what a new run would start from is not looked at."""
    folder, (losses, rates) = runs
    ckpt = folder / before / "last.ckpt"
    for found in on(after, tmp_path, 2 * STEPS, ckpt, seed=7, init_from="gone.ckpt"):
        assert found[1] == {step: rates[step] for step in range(STEPS, 2 * STEPS)}
        assert found[0] == pytest.approx({step: losses[step] for step in range(STEPS, 2 * STEPS)}, rel=1e-5)


def test_a_folder_takes_the_place_of_a_file_and_back(runs, tmp_path):
    """As when a run goes on with other devices in its own folder."""
    ckpt = Path(shutil.copy(runs[0] / "one/last.ckpt", tmp_path))
    for steps, layout in ((STEPS + 1, "fsdp"), (STEPS + 2, "one")):
        on(layout, tmp_path, steps, ckpt)
        assert ckpt.is_dir() == (layout == "fsdp")
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
        assert describe(ckpt)["global_step"] == steps


def die_in_a_save(folder):
    """Rank 1 dies when it begins to write its part of the second checkpoint."""
    begun = 0

    def count(event, arguments):
        nonlocal begun
        if event == "open" and "__1_0.distcp" in str(arguments[0]):
            begun += 1
            if begun == 2:
                os._exit(9)

    if os.environ["RANK"] == "1":
        sys.addaudithook(count)
    run("pipeline", folder, 2 * STEPS)


def test_a_run_killed_in_a_save_continues_from_the_one_before(runs, tmp_path):
    with pytest.raises(RankFailed, match="rank 1 of 2 died with exit code 9"):
        on_ranks(2, die_in_a_save, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.tmp"]
    (losses, _), *_ = on("pipeline", tmp_path, 2 * STEPS, tmp_path / "last.ckpt")
    assert losses == pytest.approx({step: runs[1][0][step] for step in range(2, 2 * STEPS)}, rel=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("layout", ["pipeline", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_another_model_is_refused(layout, runs, tmp_path):
    with pytest.raises(RankFailed, match=r"trained with model.residual=attnres_lit.BlockAttnRes, this run asks for"):
        on(layout, tmp_path, 2 * STEPS, runs[0] / "fsdp/last.ckpt", residual=PreNorm)


@pytest.mark.parametrize(("source", "layout"), [("fsdp", "one"), ("hybrid", "pipeline")])
def test_init_from_any_layout(source, layout, runs, tmp_path):
    """The first loss of a new run is the one that the old run would have had on that batch."""
    ckpt = runs[0] / source / "last.ckpt"
    (losses, _), *_ = on(layout, tmp_path, 1, init_from=str(ckpt), seed=7)
    module = tiny_module(seed=7)
    module.load_state_dict(read_full(ckpt)["state_dict"])
    with torch.no_grad():
        loss = module.nats(Tokens().rows[:4], "mean")
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
