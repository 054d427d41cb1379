"""The cut of the model: balanced, and at the end of a block where that costs little."""

import itertools
import random
import time

import pytest

from attnres_lit.model import TransformerConfig
from attnres_lit.parallel.depth import trace
from attnres_lit.parallel.partition import SLACK, balanced, costs, partition
from attnres_lit.residual import BlockAttnRes


def stages_of(starts, sites):
    return list(itertools.pairwise([0, *starts, sites]))


def test_against_every_other_cut():
    draw = random.Random(0)
    for _ in range(300):
        sites = draw.randint(1, 9)
        stages = draw.randint(1, sites)
        cost = [draw.choice([1.0, 2.0, draw.random() + 0.1]) for _ in range(sites)]
        open_block = [draw.random() < 0.6 for _ in range(sites)]

        def score(starts, cost=cost, open_block=open_block):
            sums = [sum(cost[a:b]) for a, b in stages_of(starts, len(cost))]
            return max(sums), sum(open_block[start] for start in starts), sum(each**2 for each in sums)

        found = score(balanced(cost, open_block, stages))
        every = [score(starts) for starts in itertools.combinations(range(1, sites), stages - 1)]
        best = min(bottleneck for bottleneck, _, _ in every)
        assert found[0] <= best * (1 + SLACK) * (1 + 1e-5)
        allowed = [each[1:] for each in every if each[0] <= best * (1 + SLACK)]
        assert found[1:] <= (min(allowed)[0], min(allowed)[1] + 1e-9)


@pytest.mark.parametrize("sites", [1, 7, 64])
def test_one_stage_and_one_stage_a_site(sites):
    assert balanced([1.0] * sites, [True] * sites, 1) == []
    assert balanced([1.0] * sites, [True] * sites, sites) == list(range(1, sites))


def test_prefers_the_end_of_a_block():
    open_block = [site % 25 != 0 for site in range(200)]
    assert balanced([1.0] * 200, open_block, 2) == [100]
    # 101 of 202 sites would be even; a block ends one site earlier
    open_block = [site != 100 for site in range(202)]
    assert balanced([1.0] * 202, open_block, 2) == [100]
    # two sites earlier is too far
    open_block = [site != 98 for site in range(202)]
    assert balanced([1.0] * 202, open_block, 2) == [101]


def test_512_stages_are_cut_at_once():
    start = time.perf_counter()
    assert len(balanced([3.0, 5.0] * 512, [site % 16 != 0 for site in range(1024)], 512)) == 511
    assert time.perf_counter() - start < 2


def test_of_a_model():
    config = TransformerConfig(257, num_layers=16, num_heads=4)
    depth = trace(BlockAttnRes(32, 8, num_blocks=8))
    stages = partition(config, depth.cuts, 8, 128)
    assert [site for stage in stages for site in stage] == list(range(32))
    sums = [sum(costs(config, 128)[stage.start : stage.stop]) for stage in stages]
    assert max(sums) < 1.2 * sum(sums) / 8
    assert partition(config, depth.cuts, 3, 128, [5, 7]) == [range(5), range(5, 7), range(7, 32)]


def test_layers_of_unequal_cost():
    """Most of the cost is in the last two of eight layers: halves by layers would be far from even."""
    config = TransformerConfig(31, 32, 8, 2, hidden_dim=[8] * 6 + [512] * 2)
    cost = costs(config, 32)
    costlier = [max(sum(cost[:cut]), sum(cost[cut:])) for cut in range(1, 16)]
    first, _ = partition(config, trace(BlockAttnRes(16, 32, num_blocks=8)).cuts, 2, 32)
    assert costlier[first.stop - 1] <= min(costlier) * (1 + SLACK) < costlier[8 - 1] / 1.3


@pytest.mark.parametrize("points", [[5], [7, 5], [0, 5], [5, 32], [5, 5], [3, 5, 7]])
def test_refuses_split_points(points):
    config, depth = TransformerConfig(257, num_layers=16), trace(BlockAttnRes(32, 8))
    with pytest.raises(ValueError, match=r"split_points=.* must be 2 increasing sites between 1 and 31"):
        partition(config, depth.cuts, 3, 128, points)


def test_refuses_more_stages_than_sites():
    config, depth = TransformerConfig(257, num_layers=2), trace(BlockAttnRes(4, 8))
    with pytest.raises(ValueError, match=r"5 pipeline stages .* num_layers=2 has 4: use fewer stages or more layers"):
        partition(config, depth.cuts, 5, 128)
