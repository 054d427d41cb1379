"""What a pipeline may be asked for: our sentences, and nothing that torch would refuse later."""

import itertools

import pytest

from attnres_lit.parallel.depth import trace
from attnres_lit.parallel.settings import SCHEDULES, SINGLE, PipelineSettings, check_pipeline, uses_cache
from attnres_lit.parallel.simulate import orders
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, PreNorm


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ({"schedule": "1f1b"}, {}, "unknown schedule '1f1b': known are GPipe, 1F1B, Interleaved1F1B, LoopedBFS, Inter"),
        ({"schedule": "ZBVZeroBubble"}, {}, "unknown schedule"),
        ({"pipeline_parallel_size": 0}, {}, "pipeline_parallel_size=0 must be at least 1"),
        ({"num_microbatches": -1}, {}, "num_microbatches=-1 must be at least 1"),
        ({"virtual_stages": 0}, {}, "virtual_stages=0 must be at least 1"),
        ({"cache_blocks": "yes"}, {}, "cache_blocks='yes' must be auto, true or false"),
        (
            {"virtual_stages": 2},
            {},
            "schedule 1F1B has one stage a rank, virtual_stages=2: .* use Interleaved1F1B, Loop",
        ),
        ({"schedule": "GPipe", "virtual_stages": 2}, {}, "schedule GPipe has one stage a rank"),
        ({"pipeline_parallel_size": 4, "num_microbatches": 3}, {}, "as many microbatches as stages, 4: num_microb.*=3"),
        (
            {"pipeline_parallel_size": 4, "num_microbatches": 9, "schedule": "Interleaved1F1B", "virtual_stages": 2},
            {},
            "2 rounds, of 4 microbatches or a few more each: num_microbatches=9 must be a multiple of 2",
        ),
        ({"num_microbatches": 3}, {"batch_size": 16}, "num_microbatches=3 must divide the batch size, 16"),
        (
            {"pipeline_parallel_size": 2, "num_microbatches": 2},
            {"tie_embeddings": True},
            "tied embeddings across stages",
        ),
        ({"schedule": "InterleavedZeroBubble"}, {"compiled": True}, "which compiled sublayers cannot"),
        ({"cache_blocks": True}, {}, "cache_blocks=true needs virtual_stages above 1"),
    ],
)
def test_refuses(asked, options, message):
    with pytest.raises(ValueError, match=message) as error:
        check_pipeline(PipelineSettings(**asked), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accepts_what_torch_accepts(schedule):
    for ranks, virtual, count in itertools.product(range(1, 5), range(1, 4), range(1, 11)):
        settings = PipelineSettings(ranks, count, schedule, virtual)
        if virtual > 1 and schedule in SINGLE:
            continue  # torch would not notice
        try:
            check_pipeline(settings)
        except ValueError:
            with pytest.raises(ValueError, match=r"microbatch"):
                orders(settings)
        else:
            orders(settings)


@pytest.mark.parametrize(
    ("residual", "saves"), [(BlockAttnRes, True), (DenseFormer, True), (PreNorm, False), (MHC, False)]
)
def test_caches_what_reaches_a_rank_twice(residual, saves):
    cuts = trace(residual(8, 4)).cuts[1:-1]
    assert uses_cache("auto", cuts, 2) is saves
    assert uses_cache(False, cuts, 2) is False
    assert uses_cache("auto", cuts[:1], 2) is False
    if saves:
        assert uses_cache(True, cuts, 2)
    else:
        with pytest.raises(ValueError, match="nothing to cache"):
            uses_cache(True, cuts, 2)
