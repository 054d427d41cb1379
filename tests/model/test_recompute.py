"""Checkpointing computes the same bits, and keeps what it says it keeps."""

from functools import partial

import pytest
import torch

from attnres_lit.model import Transformer, TransformerConfig, recompute
from attnres_lit.residual import BlockAttnRes, PreNorm
from residual.models import CONFIGS, factory_from_yaml, loss_of, scatter

FILES = sorted(CONFIGS.glob("*.yaml"))
CONFIG = TransformerConfig(vocab_size=31, dim=16, num_layers=3, num_heads=2)
TOKENS = torch.arange(14).view(2, 7)


def build(residual, mode, config=CONFIG):
    torch.manual_seed(0)
    return scatter(Transformer(config, residual, checkpoint_activations=mode))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("mode", ["read", True])
def test_gradients_are_the_same_to_the_bit(path, mode):
    runs = []
    for each in (False, mode):
        model = build(factory_from_yaml(path), each)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(TOKENS).float())
        runs.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(map(torch.equal, *runs))


def test_a_checkpointed_layer_keeps_the_sources_it_starts_from(monkeypatch):
    """Its saved input is the partial, as wide as PreNorm's stream; nothing that is ahead crosses into it."""
    entered = []

    def spy(function, sources, *sites, **options):
        entered.append((len(sources.done), sources.partial is not None, sources.ahead, sites))
        return function(sources, *sites)

    monkeypatch.setattr(recompute, "checkpoint", spy)
    build(partial(BlockAttnRes, block_size=3), True)(TOKENS)
    assert entered == [(1, False, (), (0, 1)), (1, True, (), (2, 3)), (2, True, (), (4, 5))]
    entered.clear()
    build(PreNorm, True)(TOKENS)
    assert [e[:2] for e in entered] == [(0, True)] * 3
    with torch.no_grad():
        build(PreNorm, True)(TOKENS)
    assert len(entered) == 3


def test_unknown_modes_and_backends_are_refused():
    with pytest.raises(ValueError, match="checkpoint_activations='all' must be read, true or false"):
        Transformer(CONFIG, PreNorm, checkpoint_activations="all")
    with pytest.raises(ValueError, match="unknown depth-attention backend 'cuda'; choose one of auto, eager"):
        Transformer(CONFIG, PreNorm, depth_backend="cuda")
    assert Transformer(CONFIG, BlockAttnRes, depth_backend="eager").residual.depth_backend == "eager"
