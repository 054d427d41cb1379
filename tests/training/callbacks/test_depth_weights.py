"""The heat map of depth-attention weights."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from attnres_lit.inference.pictures import draw_weights
from attnres_lit.inference.watch import means, record
from attnres_lit.model import Transformer
from attnres_lit.model.runner import Part
from attnres_lit.residual import BlockAttnRes, FullAttnRes
from attnres_lit.training.callbacks import DepthWeights
from training.tiny import VOCAB, Tokens, tiny_config, tiny_module, tiny_trainer

TOKENS = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))


def recorded(residual, std=0.5):
    torch.manual_seed(0)
    model = Transformer(tiny_config(num_layers=3), residual)
    for name, parameter in model.residual.named_parameters():
        if "query" in name:
            torch.nn.init.normal_(parameter, std=std)
    with torch.inference_mode():
        expected = model(TOKENS)
        with record(Part(model.residual)) as rows:
            assert model(TOKENS).equal(expected)
    assert not {"read", "exit"} & vars(model.residual).keys()
    return means(rows)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_block(num_heads):
    rows = recorded(partial(BlockAttnRes, boundaries=[3], num_heads=num_heads))
    # blocks of 3 sites; a partial stands in the column of the block that it will be
    reads = {0: [0], 1: [0, 1], 2: [0, 1], 3: [0, 1], 4: [0, 1, 2], 5: [0, 1, 2], 6: [0, 1, 2]}
    assert {site: list(row) for site, row in rows.items()} == reads
    assert all(sum(row.values()) == pytest.approx(1) for row in rows.values())
    assert rows[5][0] != pytest.approx(rows[5][1], rel=1e-3)


def test_zero_queries_are_uniform():
    rows = recorded(BlockAttnRes, std=0.0)
    assert list(rows[4].values()) == pytest.approx([1 / 5] * 5)


def test_window_keeps_the_columns_of_its_sources():
    rows = recorded(partial(FullAttnRes, window=2))
    reads = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 2, 3], 4: [0, 3, 4], 5: [0, 4, 5], 6: [0, 5, 6]}
    assert {site: list(row) for site, row in rows.items()} == reads


def test_picture():
    plain = {0: {0: 1.0}, 1: {0: 0.5, 1: 0.5}, 2: {0: 0.1, 1: 0.9}}
    image = draw_weights(plain)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert (image != draw_weights(plain | {2: {0: 0.9, 1: 0.1}})).any()
    assert (image != draw_weights(plain | {1: {0: 0.5, 1: 0.4}})).any()


def test_a_deep_model_stays_readable():
    rows = {site: dict.fromkeys(range(site + 1), 1 / (site + 1)) for site in range(257)}
    assert draw_weights(rows).shape[:2] == (1200, 1400)


def test_the_residual_is_left_as_it_was_after_an_exception(tmp_path, monkeypatch):
    module = tiny_module()

    def fail(*_):
        assert "read" in vars(module.model.residual)
        raise RuntimeError("on purpose")

    monkeypatch.setattr(module, "validation_step", fail)
    options = {"limit_val_batches": None, "val_check_interval": 1, "logger": TensorBoardLogger(tmp_path)}
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_trainer(tmp_path, callbacks=DepthWeights(tmp_path), **options).fit(module, Tokens())
    assert not {"read", "exit"} & vars(module.model.residual).keys()
