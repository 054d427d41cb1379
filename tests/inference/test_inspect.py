"""What inspect sees, against the model; and a page that needs nothing else."""

import re
from functools import partial

import numpy as np
import pytest
import torch

from attnres_lit.data.tokenizers import ByteTokenizer
from attnres_lit.inference.inspect import count_parameters, effective_sources, look_inside, most_read
from attnres_lit.inference.page import page, pictures
from attnres_lit.residual import MHC, BlockAttnRes, FullAttnRes, PreNorm
from residual.models import build, scatter

TEXT = "a<b> c"


def look(residual, text=TEXT, **config):
    model = scatter(build(residual, torch.float32, vocab_size=257, num_layers=3, **config)).eval()
    return model, look_inside(model, ByteTokenizer(), text)


@pytest.mark.parametrize("residual", [BlockAttnRes, partial(FullAttnRes, num_heads=2), PreNorm, MHC])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_add_up(residual, tie_embeddings):
    model, _ = look(residual, tie_embeddings=tie_embeddings)
    counts = count_parameters(model)
    assert sum(counts.values()) == sum(parameter.numel() for parameter in model.parameters())
    assert counts["attention"] == 3 * 4 * 16 * 16
    assert (counts["head"] == 0) == tie_embeddings


@pytest.mark.parametrize("residual", [partial(BlockAttnRes, block_size=2), partial(FullAttnRes, num_heads=2)])
def test_weights_are_those_of_each_token(residual):
    model, insight = look(residual)
    assert insight.tokens == list(TEXT)
    assert list(insight.weights) == list(range(7))
    for row in insight.weights.values():
        np.testing.assert_allclose(sum(row.values()), np.ones(len(TEXT)), rtol=1e-5)
    with torch.inference_mode():
        sources = model.residual.open(model.embed(torch.tensor([list(TEXT.encode())])))
        sources = model.run(sources, 0, 1, 2, 3)
        weights = model.residual.weights(sources, 4)
    expected = weights.flatten(3).mean(-1)[:, 0] if weights.dim() > 3 else weights[:, 0]
    np.testing.assert_allclose(np.stack(list(insight.weights[4].values())), expected, rtol=1e-5)
    assert insight.means[4][0] == pytest.approx(float(expected[0].mean()), rel=1e-5)


def test_output_rms_is_that_of_the_residual():
    model, insight = look(PreNorm)
    with torch.inference_mode():
        sources = model.residual.open(model.embed(torch.tensor([list(TEXT.encode())])))
        sources = model.run(sources, 0, 1, 2, 3)
    assert insight.rms[1] == pytest.approx(float(sources.stream.square().mean().sqrt()), rel=1e-5)
    assert list(insight.rms) == [0, 1, 2]
    assert not insight.weights


def test_without_a_text_it_reads_what_the_model_writes():
    model, insight = look(BlockAttnRes, text=None)
    assert insight.tokens[0] == "<end>"
    assert insight.tokens == look(BlockAttnRes, text=None)[1].tokens
    with pytest.raises(ValueError, match="empty"):
        look_inside(model, ByteTokenizer(), "")


def test_what_a_site_reads_most():
    row = {0: 0.1, 1: 0.4, 2: 0.4, 3: 0.1}
    assert most_read(row, 3) == [(1, 0.4), (2, 0.4), (0, 0.1)]
    assert effective_sources(dict.fromkeys(range(4), 0.25)) == pytest.approx(4)
    assert effective_sources({0: 1.0, 1: 0.0}) == 1


@pytest.mark.parametrize("residual", [BlockAttnRes, MHC])
def test_the_page_holds_its_pictures_and_asks_for_nothing(residual):
    _, insight = look(residual)
    images = pictures(insight)
    html = page(insight, "a <model>", {"residual": residual.__name__}, images)
    assert len(re.findall("<img", html)) == len(images) == (3 if residual is BlockAttnRes else 1)
    assert all(data.startswith(b"\x89PNG") for data in images.values())
    assert set(re.findall(r"src=\"([^:]*:)", html)) == {"data:"}
    assert not re.search(r"https?://|<script|<link|url\(", html)
    assert "a&lt;b&gt; c" in html
    assert "<h1>a &lt;model&gt;</h1>" in html
    assert ("no depth attention" in html) == (residual is MHC)
