"""Where blocks begin, what becomes a source, and the limits: blocks of one site, one block."""

from functools import partial

import pytest
import torch

from attnres_lit.ops import inter_block_attention, merge_partial
from attnres_lit.residual import BlockAttnRes, FullAttnRes
from attnres_lit.residual.block_attnres import block_starts
from residual.models import build, scatter


@pytest.mark.parametrize(
    ("num_sites", "options", "starts"),
    [
        (24, {}, (0, 3, 6, 9, 12, 15, 18, 21)),
        (6, {}, (0, 1, 2, 3, 4, 5)),
        (12, {}, (0, 2, 4, 6, 8, 9, 10, 11)),
        (32, {"num_blocks": 8}, (0, 4, 8, 12, 16, 20, 24, 28)),
        (10, {"num_blocks": 4}, (0, 3, 6, 8)),
        (12, {"num_blocks": 1}, (0,)),
        (54, {"block_size": 6}, (0, 6, 12, 18, 24, 30, 36, 42, 48)),
        (12, {"block_size": 8}, (0, 8)),
        (12, {"block_size": 5}, (0, 5, 10)),
        (12, {"boundaries": [2, 7]}, (0, 2, 7)),
        (12, {"boundaries": [0, 2, 7]}, (0, 2, 7)),
    ],
)
def test_block_starts(num_sites, options, starts):
    assert block_starts(num_sites, **options) == starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 2, "block_size": 3}, "got num_blocks=2 and block_size=3: set the others to null"),
        ({"num_blocks": 13}, "num_blocks=13 must be between 1 and the number of sites, 12"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 13}, "block_size=13"),
        ({"boundaries": [3, 2]}, r"boundaries=\[3, 2\] must be increasing sites between 1 and 11"),
        ({"boundaries": [12]}, "boundaries"),
        ({"boundaries": [2, 2]}, "boundaries"),
        ({"num_heads": 3}, "num_heads=3 must divide dim=16"),
        ({"eps": -1.0}, "eps=-1.0 must be above 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BlockAttnRes(12, 16, **options)


def trace(residual, outputs):
    """Number of finished sources and whether there is a partial, before each site and at the exit."""
    sources = residual.open(torch.zeros(1, 1, residual.dim))
    seen = []
    for site, output in enumerate(outputs):
        seen.append((len(sources.done), sources.partial is not None))
        sources = residual.write(sources, output, site, ())
    return [*seen, (len(sources.done), sources.partial is not None)], sources


def test_a_block_closes_at_its_last_site_and_the_embedding_stays_apart():
    residual = BlockAttnRes(8, 4, block_size=3)
    outputs = [torch.full((1, 1, 4), float(2**site)) for site in range(8)]
    seen, sources = trace(residual, outputs)
    assert seen == [
        (1, False),
        (1, True),
        (1, True),
        (2, False),
        (2, True),
        (2, True),
        (3, False),
        (3, True),
        (4, False),
    ]
    assert [t[0, 0, 0].item() for t in sources.done] == [0, 1 + 2 + 4, 8 + 16 + 32, 64 + 128]


@pytest.mark.parametrize("num_heads", [1, 4])
def test_blocks_of_one_site_are_full_attnres(tokens, num_heads):
    block = scatter(build(partial(BlockAttnRes, block_size=1, num_heads=num_heads)))
    full = scatter(build(partial(FullAttnRes, num_heads=num_heads)))
    assert torch.equal(block(tokens), full(tokens))


def test_one_block_still_holds_the_embedding_apart():
    seen, _ = trace(BlockAttnRes(4, 4, num_blocks=1), [torch.ones(1, 1, 4)] * 4)
    assert seen == [(1, False), (1, True), (1, True), (1, True), (2, False)]


def test_uneven_boundaries_equal_the_block_size_that_makes_them(tokens):
    by_size = scatter(build(partial(BlockAttnRes, block_size=5)))
    by_hand = scatter(build(partial(BlockAttnRes, boundaries=[5, 10])))
    assert torch.equal(by_size(tokens), by_hand(tokens))


@pytest.mark.parametrize("block_size", [2, 3, 4, 6, 8])
def test_algorithm_1_equals_one_shot(tokens, block_size):
    """The whole model by the report's two-phase schedule: phase 1 once a block, phase 2 at its later sites."""
    model = scatter(build(partial(BlockAttnRes, block_size=block_size)))
    residual, num_sites = model.residual, model.residual.num_sites
    finished = [model.embed(tokens)]
    for start in range(0, num_sites, block_size):
        sites = range(start, min(start + block_size, num_sites))
        queries = [residual.query[str(s)] if s else torch.zeros(16, dtype=torch.float64) for s in sites]
        gains = [residual.key_gain[str(s)] if s else torch.ones(16, dtype=torch.float64) for s in sites]
        stats = inter_block_attention(finished, torch.stack(queries), torch.stack(gains))
        h, block = stats.out[0] / stats.denom[0].unsqueeze(-1), None
        for i, site in enumerate(sites):
            if block is not None:
                h = merge_partial(stats, i, block, queries[i], gains[i])
            output = model.sublayers[str(site)](h)
            block = output if block is None else block + output
        finished.append(block)
    exit_stats = inter_block_attention(finished, residual.exit_query[None], residual.exit_key_gain[None])
    logits = model.head(model.norm(exit_stats.out[0] / exit_stats.denom[0].unsqueeze(-1)))
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-12)


def test_names_are_global_and_site_0_owns_no_query():
    names = dict(BlockAttnRes(4, 8, num_blocks=2).named_parameters())
    sites = ("1", "2", "3")
    expected = {f"{kind}.{s}" for kind in ("query", "key_gain") for s in sites} | {"exit_query", "exit_key_gain"}
    assert set(names) == expected
    assert all(p.shape == (8,) for p in names.values())
    assert not any("key_gain" in name for name, _ in BlockAttnRes(4, 8, key_norm=False).named_parameters())
