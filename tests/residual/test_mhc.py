"""mHC: orientation of the mixing matrix, what site 0 owns, and streams that really diverge in training."""

import argparse
import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.residual import MHC, Sources
from residual.models import build, loss_of, scatter
from residual.reference import reference_logits

LITE = [
    {"projection": "permutations", **more} for more in ({"exit": "learned"}, {"num_streams": 3}, {"init": "deepseek"})
]


def test_mixing_matrix_is_applied_as_rows_over_streams():
    """X'[k] = sum_j H[k, j] X[j] with an asymmetric H: its transpose would give other streams."""
    residual = MHC(4, 2, num_streams=3)
    streams = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])[None, None]
    mixing = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])[None, None]
    post = torch.tensor([1.0, 2.0, 3.0])[None, None]
    out = residual.write(Sources((), streams), torch.tensor([[[10.0, 20.0]]]), 1, (post, mixing)).stream
    expected = torch.tensor([[0.0 + 10, 1.0 + 20], [5.0 + 20, 5.0 + 40], [1.0 + 30, 0.0 + 60]])
    assert torch.equal(out[0, 0], expected)


def test_the_matrix_of_a_site_sums_to_one_over_what_it_mixes():
    residual = scatter(build(MHC)).residual
    streams = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    _, (post, mixing) = residual.read(Sources((), streams), 3)
    torch.testing.assert_close(mixing.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
    assert (mixing - mixing.mT).abs().max() > 1e-3
    assert ((post > 0) & (post < 2)).all()


def test_site_0_owns_its_write_part_only():
    residual = MHC(4, 8, num_streams=4)
    assert residual.projection["0"].shape == (4, 32)
    assert residual.projection["1"].shape == (4 + 4 + 16, 32)
    assert {id(p) for p in residual.decayed_parameters()} == {id(p) for p in residual.projection.values()}


@pytest.mark.parametrize(
    "options", [{"exit": "learned"}, {"init": "deepseek"}, {"num_streams": 2, "num_iters": 3}, *LITE]
)
def test_options_equal_the_reference(tokens, options):
    model = scatter(build(partial(MHC, **options)))
    logits, expected = model(tokens), reference_logits(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    loss_of(logits).backward()
    assert all(p.grad.norm() > 1e-9 for p in model.parameters())


def test_a_learned_exit_starts_as_prenorm_too(tokens):
    learned, mean = build(partial(MHC, exit="learned")), build(MHC)
    torch.testing.assert_close(learned(tokens), mean(tokens), rtol=0, atol=1e-9)


def test_permutations_own_a_logit_each_and_no_mixing_that_a_mean_would_not_see():
    residual = MHC(4, 8, projection="permutations")
    assert [len(residual.bias[str(site)]) for site in range(4)] == [4, 4 + 4 + 24, 4 + 4 + 24, 4 + 4]
    assert residual.bias["1"][8:].tolist() == [0.0, *[-8.0] * 23]
    assert len(MHC(4, 8, projection="permutations", exit="learned").bias["3"]) == 4 + 4 + 24
    with pytest.raises(ValueError, match="projection=permutations takes at most 4 streams, num_streams=5"):
        MHC(4, 8, num_streams=5, projection="permutations")


BAD = [{"num_streams": 1}, {"num_iters": 0}, {"exit": "sum"}, {"init": "zero"}, {"projection": "birkhoff"}]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_options_that_do_not_fit(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=str(value) if isinstance(value, int) else f"{name}={value}"):
        MHC(4, 8, **options)


def test_streams_diverge_in_training_at_the_known_pace():
    """12 layers, D 96, AdamW at 3e-3: relative spread about 1e-4 after 3 steps, 5e-4 to 3e-3 after 30."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=257, dim=96, num_layers=12), MHC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    streams = []
    model.residual.exit = lambda sources: streams.append(sources.stream.detach()) or sources.stream.mean(-2)

    def spread():
        mean = streams[-1].mean(-2, keepdim=True)
        return ((streams[-1] - mean).norm() / mean.norm() / 2).item()  # 4 streams: / sqrt(4)

    spreads = []
    for _ in range(31):
        starts = torch.randint(len(text) - 65, (4,))
        batch = torch.stack([text[s : s + 65] for s in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        spreads.append(spread())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert spreads[0] < 1e-6
    assert 5e-5 < spreads[3] < 5e-4
    assert 5e-4 < spreads[30] < 3e-3
