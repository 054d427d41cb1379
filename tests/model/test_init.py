"""The same seed gives the same weights, bit for bit, whatever the layout."""

import pytest
import torch
from torch import nn

from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.init import materialize
from attnres_lit.residual import MHC, PreNorm
from residual.models import CONFIGS, factory_from_yaml

STRATEGIES = pytest.mark.parametrize(
    "residual",
    [factory_from_yaml(path) for path in sorted(CONFIGS.glob("*.yaml"))],
    ids=lambda each: each.func.__name__,
)


class Drawn(PreNorm):
    """Draws on its own, as torch's modules do, and has one of them."""

    def __init__(self, num_sites, dim):
        super().__init__(num_sites, dim)
        self.gate = nn.Linear(dim, 1)
        self.scale = nn.ParameterDict({str(site): torch.empty(dim) for site in range(num_sites)})
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        for scale in self.scale.values():
            nn.init.uniform_(scale)
        self.table.copy_(torch.randn(3))


def build(residual, device="cpu", seed=3, **config):
    torch.manual_seed(seed)
    config = {"vocab_size": 31, "dim": 16, "num_layers": 3, "num_heads": 2} | config
    with torch.device(device):
        return Transformer(TransformerConfig(**config), residual)


def tensors(model, **options):
    return dict(model.named_parameters(**options)) | dict(model.named_buffers(**options))


def assert_same(model, whole):
    expected = tensors(whole, remove_duplicate=False)  # a shared table has the name of its first site that is there
    for name, value in tensors(model).items():
        assert not value.is_meta, name
        assert value.equal(expected[name]), name


@STRATEGIES
def test_from_meta_at_once_unit_by_unit_and_in_part(residual):
    whole = build(residual)
    materialize(at_once := build(residual, "meta"))
    assert tensors(at_once).keys() == tensors(whole).keys()
    assert_same(at_once, whole)

    by_unit = build(residual, "meta")
    torch.randn(7)  # the state of the global generator does not matter any more
    for parts in (["norm", "head"], *([f"sublayers.{s}" for s in (s, s + 1)] for s in (4, 0, 2)), ["embedding"]):
        materialize(by_unit, *parts)
    materialize(by_unit, "residual")
    assert_same(by_unit, whole)

    stage = build(residual, "meta")
    materialize(stage, "residual")
    for site in (0, 1, 2, 5):
        del stage.sublayers[str(site)]
    stage.embedding = stage.norm = stage.head = None
    materialize(stage)
    assert_same(stage, whole)
    assert "sublayers.4.mixer.rotary.cos" in tensors(stage)


def test_what_has_values_keeps_them():
    model = build(MHC, "meta")
    materialize(model, "residual", "sublayers.2")
    with torch.no_grad():
        for parameter in (*model.residual.parameters(), *model.sublayers["2"].parameters()):
            parameter.fill_(7.0)
    before = {name: value.clone() for name, value in tensors(model).items() if not value.is_meta}
    materialize(model)
    assert before
    assert all(tensors(model)[name].equal(value) for name, value in before.items() if "rotary" not in name)


def test_a_strategy_that_draws():
    whole = build(Drawn)
    materialize(model := build(Drawn, "meta"))
    assert_same(model, whole)
    assert whole.residual.gate.weight.std() > 0
    assert whole.residual.table.isfinite().all()
    assert not build(Drawn, seed=4).residual.table.equal(whole.residual.table)


def test_tied_embeddings_stay_tied():
    whole = build(PreNorm, tie_embeddings=True)
    model = build(PreNorm, "meta", tie_embeddings=True)
    materialize(model, "embedding", "norm", "head")
    materialize(model)
    assert model.head.weight is model.embedding.weight
    assert_same(model, whole)


def test_seeds_and_sites_draw_apart():
    one, other = build(PreNorm), build(PreNorm, seed=4)
    matrices = [p for model in (one, other) for p in model.parameters() if p.dim() > 1]
    assert len({tuple(p.flatten()[:4].tolist()) for p in matrices}) == len(matrices)
