"""Sizes of the residual and its gradients along depth."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.checkpoint import checkpoint

from attnres_lit.inference.watch import observe, roots
from attnres_lit.model import Transformer
from attnres_lit.residual import BlockAttnRes, PreNorm
from attnres_lit.training.callbacks import DepthDynamics
from residual.models import CONFIGS, factory_from_yaml
from training.tiny import VOCAB, Tokens, tiny_config, tiny_module, tiny_trainer

LAYERS = 3
STRATEGIES = pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
TOKENS = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))


def build(residual):
    torch.manual_seed(0)
    return Transformer(tiny_config(num_layers=LAYERS), residual)


def loss_of(model):
    return model(TOKENS).log_softmax(-1)[..., 0].mean()


def by_hand(model):
    """RMS and gradient norm after each layer, from a loop of its own."""
    residual, kept = model.residual, []
    sources = residual.open(model.embed(TOKENS))
    for site in range(2 * LAYERS):
        h, note = residual.read(sources, site)
        sources = residual.write(sources, model.sublayers[str(site)](h), site, note)
        if site % 2:
            kept.append(sources.done[-1] if sources.partial is None else sources.partial)
            kept[-1].retain_grad()
    model.head(model.norm(residual.exit(sources))).log_softmax(-1)[..., 0].mean().backward()
    streams = [(x.mean(-2), x.grad.sum(-2)) if x.dim() == 4 else (x, x.grad) for x in kept]
    return {
        "output_rms": {i: x.square().mean().sqrt().item() for i, (x, _) in enumerate(streams)},
        "grad_norm": {i: grad.norm().item() for i, (_, grad) in enumerate(streams)},
    }


def numbers(squares):
    values = sorted(roots(squares).items())
    names = ("output_rms", "grad_norm")
    return {name: {layer: value for (of, layer), value in values if of == name} for name in names}


def assert_close(values, expected):
    assert {name: list(of) for name, of in values.items()} == {name: list(of) for name, of in expected.items()}
    for name, of in expected.items():
        assert values[name] == pytest.approx(of, rel=1e-5), name


@STRATEGIES
def test_values(path):
    model = build(factory_from_yaml(path))
    with observe(model.residual) as values:
        loss_of(model).backward()
    assert_close(numbers(values), by_hand(model))
    assert "write" not in vars(model.residual)


@pytest.mark.parametrize("residual", [BlockAttnRes, PreNorm])
def test_activation_checkpointing(residual):
    """The second pass of a checkpointed step adds nothing, and its gradients are those of the first."""
    model = build(residual)

    def step(sources, site):
        h, note = model.residual.read(sources, site)
        return model.residual.write(sources, model.sublayers[str(site)](h), site, note)

    with observe(model.residual) as values:
        sources = model.residual.open(model.embed(TOKENS))
        for site in range(2 * LAYERS):
            sources = checkpoint(step, sources, site, use_reentrant=False)
        model.head(model.norm(model.residual.exit(sources))).log_softmax(-1)[..., 0].mean().backward()
    assert_close(numbers(values), by_hand(model))


def test_reentrant_activation_checkpointing():
    """In its first pass nothing requires a gradient."""
    model = build(PreNorm)

    def step(stream, site):
        sources = model.residual.open(stream)
        h, note = model.residual.read(sources, site)
        return model.residual.write(sources, model.sublayers[str(site)](h), site, note).stream

    with observe(model.residual) as values:
        stream = model.embed(TOKENS)
        for site in range(2 * LAYERS):
            stream = checkpoint(step, stream, site, use_reentrant=True)
        model.head(model.norm(stream)).log_softmax(-1)[..., 0].mean().backward()
    assert_close(numbers(values), by_hand(model))


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


@STRATEGIES
def test_training_is_the_same_with_and_without(path, tmp_path):
    losses = []
    for callbacks in ([], [DepthDynamics(every_n_steps=1)]):
        module = tiny_module(factory_from_yaml(path), config=tiny_config(num_layers=LAYERS))
        tiny_trainer(tmp_path, max_steps=6, callbacks=[*callbacks, seen := Losses()]).fit(module, Tokens())
        losses.append(seen.losses)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6


@pytest.mark.parametrize("where", ["training_step", "on_after_backward"])
def test_the_residual_is_left_as_it_was_after_an_exception(where, tmp_path, monkeypatch):
    module = tiny_module()

    def fail(*_):
        assert "write" in vars(module.model.residual)
        raise RuntimeError("on purpose")

    monkeypatch.setattr(module, where, fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_trainer(tmp_path, callbacks=DepthDynamics()).fit(module, Tokens())
    assert "write" not in vars(module.model.residual)


def test_names_sort_by_depth(tmp_path):
    logger = CSVLogger(tmp_path)
    module = tiny_module(config=tiny_config(num_layers=11))
    tiny_trainer(tmp_path, max_steps=1, callbacks=DepthDynamics(), logger=logger).fit(module, Tokens())
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    names = [name for name in header if "output_rms" in name]
    assert sorted(names) == [f"depth/output_rms/{layer:02}" for layer in range(11)]


def test_training_in_float64(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, precision="64-true", callbacks=DepthDynamics(1))
    trainer.fit(tiny_module(), Tokens())
    assert trainer.global_step == 1


def test_bad_interval():
    with pytest.raises(ValueError, match="every_n_steps=0"):
        DepthDynamics(0)
