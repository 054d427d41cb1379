"""Resuming, exactly or refused; starting a new run from weights."""

import logging
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from attnres_lit.residual import MHC, BlockAttnRes, FullAttnRes, PreNorm
from attnres_lit.training import LanguageModel, OptimConfig
from training.tiny import Tokens, tiny_config, tiny_module, tiny_trainer


class Interrupted(Exception):
    pass


class Recorder(Callback):
    """Losses and learning rates by step; saves and breaks off after `stop` steps."""

    def __init__(self, stop=None, path=None):
        self.stop, self.path = stop, path
        self.losses, self.rates, self.weights = {}, {}, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.weights is None:
            self.weights = {name: value.clone() for name, value in pl_module.model.state_dict().items()}
        self.rates[trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.global_step - 1] = outputs["loss"].clone()
        if trainer.global_step == self.stop:
            trainer.save_checkpoint(self.path)
            raise Interrupted


@pytest.fixture
def interrupted(tmp_path):
    """Path of a checkpoint of 10 steps; `build` makes the module."""

    def run(build=tiny_module):
        recorder = Recorder(stop=10, path=tmp_path / "last.ckpt")
        with pytest.raises(Interrupted):
            tiny_trainer(tmp_path, max_steps=20, callbacks=recorder, gradient_clip_val=0.5).fit(build(), Tokens())
        return recorder.path

    return run


def resume(module, path, tmp_path, max_steps=20):
    recorder, data = Recorder(), Tokens()
    data.taken = 10
    trainer = tiny_trainer(tmp_path, max_steps=max_steps, callbacks=recorder, gradient_clip_val=0.5)
    trainer.fit(module, data, ckpt_path=path, weights_only=True)
    return trainer, recorder


@pytest.mark.parametrize("residual", [partial(BlockAttnRes, num_blocks=2), MHC], ids=["block", "mhc"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "muon"])
def test_20_steps_are_10_interrupted_and_10_more(residual, schedule, interrupted, tmp_path):
    def build(seed=0):
        chosen = {"optimizer": "muon"} if schedule == "muon" else {"schedule": schedule}
        optim = OptimConfig(lr=1e-2, warmup_steps=4, total_steps=18, **chosen)
        return tiny_module(residual, seed, optim)

    whole, uncut = build(), Recorder()
    trainer = tiny_trainer(tmp_path, max_steps=20, callbacks=uncut, gradient_clip_val=0.5)
    trainer.fit(whole, Tokens())

    path = interrupted(build)
    continued = build(seed=7)
    resumed, recorder = resume(continued, path, tmp_path)

    assert list(recorder.losses) == list(range(10, 20))
    assert all(loss.equal(uncut.losses[step]) for step, loss in recorder.losses.items())
    assert all(rates == uncut.rates[step] for step, rates in recorder.rates.items())
    assert all(a.equal(b) for a, b in zip(whole.parameters(), continued.parameters(), strict=True))
    states = [each.optimizers[0].state_dict() for each in (trainer, resumed)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)
    schedulers = [each.lr_scheduler_configs[0].scheduler.state_dict() for each in (trainer, resumed)]
    assert schedulers[0] == schedulers[1]


def test_optimizer_settings_of_the_resumed_run_hold(interrupted, tmp_path):
    path = interrupted()
    optim = OptimConfig(lr=3e-2, betas=(0.5, 0.6), eps=1e-5, weight_decay=0.3, warmup_steps=4, total_steps=40)
    trainer, recorder = resume(tiny_module(optim=optim), path, tmp_path, max_steps=11)
    decay, no_decay = trainer.optimizers[0].param_groups
    assert recorder.rates == {10: [3e-2 * optim.factor(10)] * 2}
    assert decay["lr"] == no_decay["lr"] == 3e-2 * optim.factor(11)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.3, 0.0)
    assert decay["betas"] == no_decay["betas"] == (0.5, 0.6)
    assert decay["eps"] == 1e-5
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {11}  # the moments are old ones


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": partial(BlockAttnRes, num_blocks=4)}, r"model.residual.num_blocks=2, this run asks for 4: make"),
        (
            {"residual": partial(BlockAttnRes, block_size=2, key_norm=False)},
            r"num_blocks=2, this run asks for None; model.residual.block_size=None, this run asks for 2; "
            r"model.residual.key_norm=True, this run asks for False",
        ),
        ({"residual": MHC}, r"with model.residual=attnres_lit.BlockAttnRes, this run asks for attnres_lit.MHC: make"),
        ({"config": tiny_config(num_heads=4)}, r"model.config.num_heads=2, this run asks for 4"),
        ({"config": tiny_config(hidden_dim=[40, 48])}, r"hidden_dim=None, this run asks for \[40, 48\]: make"),
        ({"fp32_residual": True}, r"model.fp32_residual=False, this run asks for True"),
    ],
    ids=["option", "two-options", "strategy", "config", "widths", "fp32"],
)
def test_another_architecture_is_refused(changes, message, interrupted, tmp_path):
    block = partial(BlockAttnRes, num_blocks=2)
    path = interrupted(lambda: tiny_module(block))
    with pytest.raises(ValueError, match=message) as error:
        resume(tiny_module(**{"residual": block} | changes), path, tmp_path)
    assert "\n" not in str(error.value)


def edited(path, edit):
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_options_newer_than_the_checkpoint_do_not_conflict(interrupted, tmp_path):
    path = edited(interrupted(), lambda c: c["hyper_parameters"]["residual"]["init_args"].pop("num_heads"))
    assert resume(tiny_module(), path, tmp_path)[0].global_step == 20


def test_without_hyper_parameters_the_weights_are_compared(interrupted, tmp_path):
    path = edited(interrupted(), lambda c: c.pop("hyper_parameters"))
    assert resume(tiny_module(), path, tmp_path)[0].global_step == 20
    with pytest.raises(ValueError, match=r"no hyper-parameters, .*: model.embedding.weight \(31, 16\) for \(31, 8\)"):
        resume(tiny_module(config=tiny_config(dim=8)), path, tmp_path)


def test_weights_that_do_not_fit_equal_options_are_refused(interrupted, tmp_path):
    """As after an edit of the strategy's own code."""
    path = edited(interrupted(), lambda c: c["state_dict"].pop("model.residual.exit_query"))
    with pytest.raises(ValueError, match=r"its weights do not fit: model.residual.exit_query missing"):
        resume(tiny_module(), path, tmp_path)


def start(module, tmp_path):
    recorder = Recorder()
    trainer = tiny_trainer(tmp_path, max_steps=1, callbacks=recorder)
    trainer.fit(module, Tokens())
    return trainer, recorder


def test_init_from_takes_the_weights_alone(interrupted, tmp_path):
    path = interrupted()
    trainer, recorder = start(tiny_module(seed=7, init_from=str(path)), tmp_path)
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(stored[f"model.{name}"].equal(value) for name, value in recorder.weights.items())
    assert recorder.rates[0] == [1e-2 / 4] * 2
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {1}


def test_init_from_another_residual_shares_the_rest(interrupted, tmp_path, caplog):
    path = interrupted(lambda: tiny_module(FullAttnRes))
    fresh = tiny_module(BlockAttnRes, seed=7, init_from=str(path))
    initial = {name: value.clone() for name, value in fresh.model.state_dict().items()}
    with caplog.at_level(logging.INFO):
        _, recorder = start(fresh, tmp_path)
    stored = torch.load(path, weights_only=True)["state_dict"]
    for name, value in recorder.weights.items():
        expected = initial[name] if name.startswith("residual.") else stored[f"model.{name}"]
        assert value.equal(expected), name
    assert [line for line in caplog.messages if "attnres_lit.BlockAttnRes starts fresh" in line]


def test_init_from_is_not_needed_again(interrupted, tmp_path):
    path = interrupted()
    gone = str(tmp_path / "gone.ckpt")
    resume(tiny_module(init_from=gone), path, tmp_path)
    assert LanguageModel.load_from_checkpoint(path).init_from is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": tiny_config(dim=8)},
            r"embedding.weight \(31, 16\) for \(31, 8\), .* more of another shape",
        ),
        ({"config": tiny_config(num_layers=1)}, r"sublayers.2.norm.weight, .* unknown"),
        ({"config": tiny_config(num_layers=3)}, r"sublayers.4.norm.weight, .* missing"),
        ({"config": tiny_config(num_heads=4)}, r"model.config.num_heads=2, this run has 4"),
        ({"config": tiny_config(tie_embeddings=True)}, r"its head is not its embedding"),
        ({"residual": partial(BlockAttnRes, key_norm=False)}, r"residual.key_gain.1, .* unknown"),
    ],
    ids=["width", "shallower", "deeper", "heads", "tied", "option"],
)
def test_init_from_weights_that_do_not_fit(changes, message, interrupted, tmp_path):
    path = str(interrupted())
    with pytest.raises(ValueError, match=message) as error:
        start(tiny_module(**changes, init_from=path), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no {path}"),
        (b"PK not a checkpoint", "{path} is not a checkpoint, or it is damaged"),
        ({"a": 1}, "{path} is not a checkpoint of Lightning"),
    ],
)
def test_init_from_what_is_not_a_checkpoint(content, message, tmp_path):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=f"^model.init_from: {message.format(path=path)}"):
        start(tiny_module(PreNorm, init_from=str(path)), tmp_path)
