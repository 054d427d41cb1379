"""The ablations of AttnRes beyond the files in configs/residual/: every way to combine them equals the reference."""

from functools import partial

import pytest
import torch

from attnres_lit.residual import BlockAttnRes, FullAttnRes
from residual.models import build, loss_of, scatter
from residual.reference import reference_logits

VARIANTS = [
    {"query": "input"},
    {"query": "input", "num_heads": 4},
    {"query": "input", "key_norm": False, "mixing": "sigmoid"},
    {"mixing": "sigmoid"},
    {"mixing": "sigmoid", "num_heads": 2},
    {"mixing": "static"},
    {"mixing": "static", "num_heads": 4},
    {"key_norm": False},
    {"num_heads": 4},
]
STRATEGIES = [partial(BlockAttnRes, block_size=5), partial(FullAttnRes, window=3), FullAttnRes]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["block", "window", "full"])
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(map(str, options.values())))
def test_equals_the_reference(tokens, strategy, options):
    model = scatter(build(partial(strategy, **options)))
    results = []
    for logits in (model(tokens), reference_logits(model, tokens)):
        results.append([logits.detach(), *torch.autograd.grad(loss_of(logits), list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(map(str, options.values())))
def test_blocks_of_one_site_are_full(tokens, options):
    block, full = (
        scatter(build(s)) for s in (partial(BlockAttnRes, block_size=1, **options), partial(FullAttnRes, **options))
    )
    torch.testing.assert_close(block(tokens), full(tokens), rtol=0, atol=1e-12)


def test_what_each_variant_owns():
    def shapes(**options):
        residual = BlockAttnRes(4, 8, num_blocks=2, **options)
        return {name: tuple(parameter.shape) for name, parameter in residual.named_parameters()}

    gains = {f"key_gain.{site}": (8,) for site in (1, 2, 3)} | {"exit_key_gain": (8,)}
    assert shapes(query="input") == {f"query.{s}": (8, 8) for s in (1, 2, 3)} | {"exit_query": (8, 8)} | gains
    counts = {"logits.1": (2,), "logits.2": (2,), "logits.3": (3,), "exit_logits": (3,)}
    assert shapes(mixing="static") == counts
    assert shapes(mixing="static", num_heads=2) == {name: (2, *shape) for name, shape in counts.items()}
    assert shapes(mixing="sigmoid") == shapes()


def test_matrices_decay():
    residual = FullAttnRes(4, 8, query="input")
    decayed = {id(parameter) for parameter in residual.decayed_parameters()}
    assert decayed == {id(p) for p in residual.parameters() if p.dim() == 2}
    assert not list(FullAttnRes(4, 8).decayed_parameters())


def test_two_phases_are_for_the_softmax_of_static_queries():
    with pytest.raises(ValueError, match="two_phase=true needs the softmax of static queries"):
        FullAttnRes(6, 8, mixing="sigmoid", two_phase=True)
    assert not FullAttnRes(6, 8, query="input")._runs
