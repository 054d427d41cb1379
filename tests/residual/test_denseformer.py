"""Which layer outputs DenseFormer averages, and which it still holds."""

from functools import partial

import pytest
import torch

from attnres_lit.residual import DenseFormer, PreNorm
from residual.models import build, loss_of, scatter
from residual.reference import reference_logits

CUTS = [(1, 1), (2, 1), (1, 3), (2, 3), (4, 2), (6, 6), (3, 4)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_prenorm_exactly_at_the_start(tokens, dtype):
    eps = 1e-12
    assert torch.equal(build(DenseFormer, dtype, norm_eps=eps)(tokens), build(PreNorm, dtype, norm_eps=eps)(tokens))


@pytest.mark.parametrize(("dilation", "period"), CUTS)
def test_every_dilation_and_period_equals_the_paper(tokens, dilation, period):
    model = scatter(build(partial(DenseFormer, dilation=dilation, period=period)))
    logits, expected = model(tokens), reference_logits(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    loss_of(logits).backward()
    assert all(alpha.grad.abs().min() > 1e-9 for alpha in model.residual.alpha.values())


def test_holds_only_what_a_later_layer_reads():
    residual = DenseFormer(12, 4, dilation=2, period=3)  # layers 3 and 6 average over {1, 3} and {0, 2, 4, 6}
    sources = residual.open(torch.zeros(1, 1, 4))
    held = [len(sources.done)]
    for site in range(12):
        sources = residual.write(sources, torch.ones(1, 1, 4), site, ())
        if site % 2:
            held.append(len(sources.done))
    assert held == [1, 2, 3, 2, 3, 3, 0]


def test_after_an_unmixed_layer_the_stream_is_the_newest_source():
    residual = DenseFormer(8, 4, period=2)
    sources = residual.open(torch.zeros(1, 1, 4))
    for site in range(2):
        sources = residual.write(sources, torch.ones(1, 1, 4), site, ())
    assert sources.partial is sources.done[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dilation": 7}, "dilation=7 must be between 1 and the number of layers, 6"),
        ({"period": 7}, "period=7"),
        ({"period": 0}, "period=0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        DenseFormer(12, 4, **options)


def test_an_odd_number_of_sites_is_refused():
    with pytest.raises(ValueError, match="num_sites=5 must be even"):
        DenseFormer(5, 4)
