"""The optimizer's groups and the learning-rate schedule."""

import dataclasses
import pickle
from functools import partial

import pytest
import torch
import yaml
from torch import nn

from attnres_lit.model import Transformer
from attnres_lit.parallel.optimizer_state import group_names
from attnres_lit.residual import FullAttnRes, PreNorm
from attnres_lit.training.optim import OptimConfig, parameter_groups, restore_by_name
from residual.models import CONFIGS, factory_from_yaml
from training.tiny import VOCAB, tiny_config


def names_by_group(model):
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{names[parameter] for parameter in group["params"]} for group in groups]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_groups(path):
    model = Transformer(tiny_config(), factory_from_yaml(path))
    decay, no_decay = names_by_group(model)
    assert decay | no_decay == {name for name, _ in model.named_parameters()}
    assert not decay & no_decay
    projecting = {"mhc": range(4), "mhc_lite": range(4), "hc": range(4)}.get(path.stem, ())
    projections = {f"residual.projection.{site}" for site in projecting}
    if path.stem == "full_input":
        projections = {"residual.exit_query", *(f"residual.query.{site}" for site in (1, 2, 3))}
    matrices = {f"sublayers.{site}.mixer.{p}_proj.weight" for site in (0, 2) for p in "qkvo"}
    matrices |= {f"sublayers.{site}.mixer.{p}_proj.weight" for site in (1, 3) for p in ("gate", "up", "down")}
    assert decay == matrices | projections | {"head.weight"}


def test_tied_embedding_does_not_decay():
    decay, no_decay = names_by_group(Transformer(tiny_config(tie_embeddings=True), PreNorm))
    assert "embedding.weight" in no_decay
    assert "head.weight" not in decay


def test_residual_may_not_claim_other_parameters():
    class Greedy(PreNorm):
        def decayed_parameters(self):
            return [nn.Parameter(torch.zeros(1))]

    with pytest.raises(AssertionError, match="of its own"):
        parameter_groups(Transformer(tiny_config(), Greedy), 0.1)


def test_cosine():
    optim = OptimConfig(warmup_steps=4, total_steps=24, final_lr=0.2)
    assert [optim.factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert optim.factor(4) == 1.0
    assert optim.factor(14) == pytest.approx(0.6)  # half way down
    assert optim.factor(24) == optim.factor(1000) == pytest.approx(0.2)


def test_wsd():
    optim = OptimConfig(schedule="wsd", warmup_steps=4, total_steps=24, decay_steps=10, final_lr=0.2)
    assert optim.factor(1) == 0.5
    assert {optim.factor(step) for step in range(4, 15)} == {1.0}
    assert optim.factor(19) == pytest.approx(0.6)
    assert optim.factor(24) == optim.factor(1000) == pytest.approx(0.2)
    assert OptimConfig(schedule="wsd", total_steps=100).fall == 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, r"optim.lr=0.0 must be above 0"),
        ({"betas": (0.9, 1.0)}, r"optim.betas=\(0.9, 1.0\)"),
        ({"eps": 0.0}, r"optim.eps"),
        ({"weight_decay": -0.1}, r"optim.weight_decay"),
        ({"schedule": "linear"}, r"optim.schedule=linear must be one of cosine, wsd"),
        ({"final_lr": 1.5}, r"optim.final_lr"),
        ({"warmup_steps": -1}, r"optim.warmup_steps"),
        ({"total_steps": 0}, r"optim.total_steps"),
        ({"warmup_steps": 500}, r"do not fit into optim.total_steps=500"),
        ({"schedule": "wsd", "decay_steps": 0}, r"a decay of 0 steps"),
        ({"schedule": "wsd", "decay_steps": 460}, r"a decay of 460 steps"),
        ({"decay_steps": 10}, r"belongs to schedule=wsd"),
        ({"optimizer": "sgd"}, r"optim.optimizer=sgd must be one of adamw, muon"),
        ({"momentum": 1.0}, r"optim.momentum=1.0 must be from 0 to below 1"),
        ({"ns_steps": 0}, r"optim.ns_steps=0"),
        ({"adjust_lr_fn": "rms"}, r"optim.adjust_lr_fn=rms must be one of original, match_rms_adamw"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**values)


@pytest.mark.parametrize("name", ["adamw_cosine", "adamw_wsd", "muon_wsd"])
def test_config_files_show_every_field(name):
    values = yaml.safe_load((CONFIGS.parent / "optim" / f"{name}.yaml").read_text())
    assert list(values) == [field.name for field in dataclasses.fields(OptimConfig)]
    config = OptimConfig(**values | {"betas": tuple(values["betas"])})
    if name == "adamw_cosine":
        assert config == OptimConfig()


def muon(model, **options):
    return OptimConfig(optimizer="muon", warmup_steps=0, total_steps=10, schedule="wsd", **options).build(model, False)


def test_muon_takes_the_matrices_of_the_sublayers_and_nothing_else():
    model = Transformer(tiny_config(), partial(FullAttnRes, query="input"))
    optimizer, _ = muon(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, decay, rest = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert matrices == {
        name for name in names.values() if name.startswith("sublayers") and name.endswith("proj.weight")
    }
    assert decay == {"head.weight", "residual.exit_query", *(f"residual.query.{site}" for site in (1, 2, 3))}
    assert matrices | decay | rest == set(names.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(12).view(2, 6) * (1 + scheduler.last_epoch) % VOCAB
        model(tokens).log_softmax(-1).square().mean().backward()
        optimizer.step()
        scheduler.step()


def test_muon_and_adamw_step_as_two_optimizers_would():
    one, two = (Transformer(tiny_config(), PreNorm) for _ in range(2))
    two.load_state_dict(one.state_dict())
    optimizer, scheduler = muon(one, lr=0.01, decay_steps=10)
    train(one, optimizer, scheduler, 3)
    matrices, decay, rest = ([dict(two.named_parameters())[n] for n in names] for names in group_names(optimizer, one))
    first = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
    options = {"lr": 0.01, "betas": (0.9, 0.95)}
    second = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], **options
    )
    for step in range(3):
        for each in (first, second):
            each.zero_grad()
            for group in each.param_groups:
                group["lr"] = 0.01 * (1 - step / 10)
        two(torch.arange(12).view(2, 6) * (1 + step) % VOCAB).log_softmax(-1).square().mean().backward()
        first.step()
        second.step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_muon_continues_bit_for_bit_from_its_state_dict():
    whole, stopped = (Transformer(tiny_config(), PreNorm) for _ in range(2))
    stopped.load_state_dict(whole.state_dict())
    train(whole, *muon(whole), 4)
    optimizer, scheduler = muon(stopped)
    train(stopped, optimizer, scheduler, 2)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    again, after = muon(stopped)
    again.load_state_dict(state)
    after.load_state_dict(scheduler.state_dict())
    train(stopped, again, after, 2)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), stopped.parameters(), strict=True))


def test_a_restored_muon_gets_the_settings_of_this_run():
    model = Transformer(tiny_config(), PreNorm)
    optimizer, scheduler = muon(model, residual_lr=0.5)
    config = OptimConfig(optimizer="muon", lr=0.01, residual_lr=0.02, momentum=0.8, weight_decay=0.3, warmup_steps=10)
    config.apply(optimizer, scheduler)
    groups = optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.001, 0.002, 0.001, 0.002])
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.3, 0.0, 0.0]
    assert groups[0]["momentum"] == 0.8
    assert "betas" not in groups[0]
    assert "momentum" not in groups[1]


def test_the_state_of_another_optimizer_is_refused():
    model = Transformer(tiny_config(), PreNorm)
    optimizer, _ = muon(model)
    restore_by_name(optimizer, model)
    state = OptimConfig().build(model, False)[0].state_dict()
    with pytest.raises(ValueError, match=r"has 2 parameter groups, this run's has 3: set optim.optimizer"):
        optimizer.load_state_dict(state)


def test_depth_parameters_with_a_learning_rate_of_their_own():
    model = Transformer(tiny_config(), factory_from_yaml(CONFIGS / "mhc.yaml"))
    config = OptimConfig(lr=1e-3, residual_lr=1e-1, warmup_steps=2, total_steps=4, weight_decay=0.3)
    optimizer, scheduler = config.build(model, fused=False)
    residual = set(model.residual.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-2] * 2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0, 0.0]
    assert [residual >= set(group["params"]) for group in optimizer.param_groups] == [False, True, False, True]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    optimizer.step()
    scheduler.step()
    dataclasses.replace(config, residual_lr=2e-1).apply(optimizer, scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 2e-1, 1e-3, 2e-1])
    optimizer.step()
    scheduler.step()
    factor = config.factor(2)  # of a schedule that `apply` leaves alone
    assert scheduler.get_last_lr() == pytest.approx([1e-3 * factor, 2e-1 * factor] * 2)
    with pytest.raises(ValueError, match=r"optim\.residual_lr=0 must be above 0, or null"):
        OptimConfig(residual_lr=0)
