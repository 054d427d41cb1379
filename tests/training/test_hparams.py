"""Hyper-parameters are plain values, and rebuild the module, from the command line and from Python."""

from functools import partial

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from attnres_lit.residual import MHC, BlockAttnRes, FullAttnRes, PreNorm
from attnres_lit.training import LanguageModel, OptimConfig
from attnres_lit.training.hparams import describe
from training.tiny import Tokens, tiny_config, tiny_module, tiny_trainer

BLOCK = {
    "num_blocks": 2,
    "block_size": None,
    "boundaries": None,
    "query": "static",
    "mixing": "softmax",
    "key_norm": True,
    "num_heads": 1,
    "two_phase": "auto",
    "eps": 1e-6,
}


class Scaled(PreNorm):
    """A strategy of a user."""

    def __init__(self, num_sites: int, dim: int, scale: float = 1.0, sites: list[int] | None = None) -> None:
        super().__init__(num_sites, dim)
        self.scale, self.sites = scale, sites

    def read(self, sources, site):
        return sources.stream * self.scale, ()


def from_command_line(*args):
    cli = LightningCLI(
        LanguageModel,
        run=False,
        save_config_callback=None,
        trainer_defaults={"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
        args=["--model.config.vocab_size=31", "--model.config.dim=16", "--model.config.num_heads=2", *args],
    )
    return cli.model


def saved(module, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.fit(module, Tokens())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


def assert_plain(value):
    assert value is None or type(value) in (dict, list, bool, int, float, str)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        assert_plain(each)


def test_command_line_and_python_store_the_same():
    options = ["--model.config.num_layers=2", "--model.config.hidden_dim=[24, 40]"]
    options += ["--model.residual=BlockAttnRes", "--model.residual.num_blocks=2"]
    by_flags = from_command_line(*options, "--model.optim.lr=0.01")
    in_python = LanguageModel(
        tiny_config(hidden_dim=[24, 40]), partial(BlockAttnRes, num_blocks=2), OptimConfig(lr=0.01)
    )
    assert dict(by_flags.hparams) == dict(in_python.hparams)
    assert in_python.hparams["residual"] == {"class_path": "attnres_lit.BlockAttnRes", "init_args": BLOCK}
    assert in_python.hparams["optim"]["betas"] == [0.9, 0.95]
    assert_plain(dict(in_python.hparams))


@pytest.mark.parametrize("build", [from_command_line, lambda: LanguageModel(tiny_config())], ids=["flags", "python"])
def test_default_residual(build):
    assert build().hparams["residual"]["class_path"] == "attnres_lit.BlockAttnRes"


def test_nested_partials():
    spec = describe(partial(partial(MHC, num_streams=2, exit="mean"), exit="learned"))
    chosen = {"num_streams": 2, "exit": "learned"}
    assert spec["init_args"] == {"num_iters": 20, "init": "prenorm", "projection": "sinkhorn", **chosen}


@pytest.mark.parametrize(
    ("residual", "expected"),
    [
        (PreNorm, {}),
        (partial(FullAttnRes, window=2, key_norm=False), {"window": 2}),
        (partial(BlockAttnRes, boundaries=[1, 3]), {"starts": (0, 1, 3)}),
        (partial(Scaled, scale=2.0, sites=[1, 2]), {"scale": 2.0, "sites": [1, 2]}),
    ],
    ids=["prenorm", "full", "block", "of-a-user"],
)
def test_a_checkpoint_rebuilds_the_strategy(residual, expected, tmp_path):
    optim, config = OptimConfig(betas=(0.8, 0.9), warmup_steps=1), tiny_config(hidden_dim=[24, 40])
    module = tiny_module(residual, optim=optim, config=config, fp32_residual=True)
    path = saved(module, tmp_path)
    assert_plain(torch.load(path, weights_only=True)["hyper_parameters"])
    loaded = LanguageModel.load_from_checkpoint(path, weights_only=True)
    assert type(loaded.model.residual) is type(module.model.residual)
    assert {name: getattr(loaded.model.residual, name) for name in expected} == expected
    assert loaded.optim == module.optim
    assert loaded.model.fp32_residual
    assert dict(loaded.hparams) == dict(module.hparams)
    tokens = torch.arange(8).view(1, 8)
    assert loaded(tokens).equal(module(tokens))


def test_a_checkpoint_of_the_command_line_rebuilds_the_strategy(tmp_path):
    path = saved(
        from_command_line("--model.residual=training.test_hparams.Scaled", "--model.residual.scale=3"), tmp_path
    )
    loaded = LanguageModel.load_from_checkpoint(path, weights_only=True, compile=True)
    assert loaded.model.residual.scale == 3
    assert loaded.compiled  # what is given anew holds


def local():
    class Local(PreNorm):
        pass

    return Local


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda sites, dim: PreNorm(sites, dim), "use a strategy class that can be imported, or a functools.partial"),
        (partial(lambda sites, dim, n: BlockAttnRes(sites, dim, n), n=2), "use a strategy class"),
        (local(), "use a strategy class"),
        (partial(Scaled, scale=torch.ones(1)), "scale=tensor.* cannot be stored in a checkpoint: use numbers"),
    ],
    ids=["lambda", "partial-of-lambda", "local-class", "tensor"],
)
def test_what_cannot_be_stored_is_refused(residual, message):
    with pytest.raises(ValueError, match=message):
        tiny_module(residual)
