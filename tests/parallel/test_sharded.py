"""The strategies' side of sharded checkpoints: runs of Lightning that are broken off and continued elsewhere."""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from attnres_lit import PreNorm
from attnres_lit.parallel.checkpoint import describe, read_full
from attnres_lit.parallel.sharded import ShardedCheckpoint
from attnres_lit.training.callbacks import LastCheckpoint
from attnres_lit.training.checkpoint_io import CheckpointFiles
from parallel.world import RankFailed, on_ranks
from training.tiny import Tokens, tiny_module, tiny_trainer

STEPS = 4


class Strategy(ShardedCheckpoint, ModelParallelStrategy):
    """FSDP2, but for the sharding itself."""


def sharded(module):
    """Have a module shard itself when Lightning asks for it."""

    def configure_model():
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            mesh = module.device_mesh["data_parallel"]
            for sublayer in module.model.sublayers.values():
                fully_shard(sublayer, mesh=mesh)
            fully_shard(module.model, mesh=mesh)

    module.configure_model = configure_model
    return module


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
    """Every process reads the same batches. Returns losses and learning rates by step, and where the data continued."""
    callback, data = Losses(folder), Tokens()
    if ckpt is not None:
        data.taken = describe(ckpt)["global_step"]
    module = tiny_module(**options)
    strategy = {
        "one": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp": lambda: Strategy(data_parallel_size=2, tensor_parallel_size=1),
    }[layout]()
    if layout == "fsdp":
        sharded(module)
    trainer = tiny_trainer(
        folder,
        max_steps=steps,
        devices=1 if layout == "one" else 2,
        strategy=strategy,
        callbacks=callback,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        plugins=[] if layout == "fsdp" else [CheckpointFiles()],
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    assert ckpt is None or callback.seen == data.taken
    return callback.losses, callback.rates


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each layout: the folder of a run that was broken off half way; and what a whole run says."""
    folder = tmp_path_factory.mktemp("runs")
    whole = run("one", folder / "whole", 2 * STEPS)
    for layout, size in {"one": 1, "ddp": 2, "fsdp": 2}.items():
        on_ranks(size, run, layout, folder / layout, STEPS)
    return folder, whole


def test_files_and_folders(runs):
    folder, _ = runs
    kinds = {layout: (folder / layout / "last.ckpt").is_file() for layout in ("one", "ddp", "fsdp")}
    assert kinds == {"one": True, "ddp": True, "fsdp": False}
    rest = torch.load(folder / "fsdp/last.ckpt/meta.pt", weights_only=True)
    assert rest["global_step"] == STEPS
    assert {"hyper_parameters", "loops", "callbacks", "lr_schedulers", "optimizer_states"} <= rest.keys()


def test_the_same_checkpoint_whoever_writes_it(runs):
    one, fsdp = (read_full(runs[0] / layout / "last.ckpt") for layout in ("one", "fsdp"))
    assert one.keys() == fsdp.keys()
    assert list(one["state_dict"]) == list(fsdp["state_dict"])
    for key in ("epoch", "global_step", "hyper_parameters", "loops", "lr_schedulers"):
        assert one[key] == fsdp[key]
    (a,), (b,) = (each["optimizer_states"] for each in (one, fsdp))
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [("one", "fsdp"), ("fsdp", "one"), ("fsdp", "ddp")])
def test_a_run_continues_in_another_layout(before, after, runs, tmp_path):
    """With the losses and learning rates of the whole run; what a new run would start from is not looked at."""
    folder, (losses, rates) = runs
    args = (after, tmp_path, 2 * STEPS, folder / before / "last.ckpt")
    for found in on_ranks(1 if after == "one" else 2, run, *args, seed=7, init_from="gone.ckpt"):
        assert found[1] == {step: rates[step] for step in range(STEPS, 2 * STEPS)}
        assert found[0] == pytest.approx({step: losses[step] for step in range(STEPS, 2 * STEPS)}, rel=1e-5)


def test_a_folder_takes_the_place_of_a_file_and_back(runs, tmp_path):
    """As when a run goes on with other devices in its own folder."""
    ckpt = Path(shutil.copy(runs[0] / "one/last.ckpt", tmp_path))
    for steps, layout, size in ((STEPS + 1, "fsdp", 2), (STEPS + 2, "one", 1)):
        on_ranks(size, run, layout, tmp_path, steps, ckpt)
        assert ckpt.is_dir() == (layout == "fsdp")
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
        assert describe(ckpt)["global_step"] == steps


def test_another_model_is_refused(runs, tmp_path):
    with pytest.raises(RankFailed, match=r"trained with model.residual=attnres_lit.BlockAttnRes, this run asks for"):
        on_ranks(2, run, "fsdp", tmp_path, 2 * STEPS, runs[0] / "fsdp/last.ckpt", residual=PreNorm)


@pytest.mark.parametrize(("source", "layout"), [("fsdp", "one"), ("one", "fsdp")])
def test_init_from_any_layout(source, layout, runs, tmp_path):
    """The first loss of a new run is the one that the old run would have had on that batch."""
    ckpt = runs[0] / source / "last.ckpt"
    size, options = 1 if layout == "one" else 2, {"init_from": str(ckpt), "seed": 7}
    (losses, _), *_ = on_ranks(size, run, layout, tmp_path, 1, **options)
    module = tiny_module(seed=7)
    module.load_state_dict(read_full(ckpt)["state_dict"])
    with torch.no_grad():
        loss = module.nats(Tokens().rows[:4], "mean")
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
