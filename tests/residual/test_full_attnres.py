"""The window of Full AttnRes."""

from functools import partial

import pytest
import torch

from attnres_lit.residual import FullAttnRes
from residual.models import build, scatter


def test_window_holds_the_embedding_and_the_newest_outputs():
    residual = FullAttnRes(6, 4, window=2)
    sources = residual.open(torch.zeros(1, 1, 4))
    held = []
    for site in range(6):
        sources = residual.write(sources, torch.full((1, 1, 4), site + 1.0), site, ())
        held.append([t[0, 0, 0].item() for t in sources.done])
    assert held == [[0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5], [0, 5, 6]]


def test_a_window_as_long_as_the_model_is_full(tokens):
    whole, windowed = scatter(build(FullAttnRes)), scatter(build(partial(FullAttnRes, window=12)))
    assert torch.equal(whole(tokens), windowed(tokens))
    assert windowed.residual.starts_as_prenorm
    assert not build(partial(FullAttnRes, window=11)).residual.starts_as_prenorm


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        FullAttnRes(6, 4, window=0)
