"""Where a pipeline is cut: consecutive sites of about equal cost for every stage."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.flops import head_flops, site_flops
from attnres_lit.parallel.depth import Cut

SLACK = 0.01  # a stage may cost this much more than the best balance, for a cut that sends no partial


def partition(
    config: TransformerConfig,
    cuts: Sequence[Cut],
    num_stages: int,
    tokens: int,
    split_points: Sequence[int] | None = None,
) -> list[range]:
    """The sites of every stage.

    Args:
        config: sizes of the model.
        cuts: of the residual, one before every site and one before the exit.
        num_stages: stages of the whole pipeline, virtual ones counted.
        tokens: length of a sequence, which decides what attention costs beside the MLP.
        split_points: the first site of every stage but the first; None balances the FLOPs of the stages, the head's
            counted to the last.

    Raises:
        ValueError: more stages than sites; `split_points` that are not `num_stages - 1` increasing sites.
    """
    num_sites = config.num_sites
    if num_stages > num_sites:
        raise ValueError(
            f"{num_stages} pipeline stages need at least as many sites, num_layers={config.num_layers} has "
            f"{num_sites}: use fewer stages or more layers"
        )
    if split_points is None:
        split_points = balanced(costs(config, tokens), [_is_within_block(cut) for cut in cuts], num_stages)
    starts = [0, *split_points, num_sites]
    if len(starts) != num_stages + 1 or any(a >= b for a, b in pairwise(starts)):
        raise ValueError(
            f"split_points={list(split_points)} must be {num_stages - 1} increasing sites between 1 and "
            f"{num_sites - 1}: the first site of every stage but the first"
        )
    return [range(a, b) for a, b in pairwise(starts)]


def costs(config: TransformerConfig, tokens: int) -> list[float]:
    """FLOPs per token of every site; the last one has the head with it."""
    *sites, last = site_flops(config, tokens)
    return [*sites, last + head_flops(config)]


def balanced(costs: Sequence[float], within_block: Sequence[bool], num_stages: int) -> list[int]:
    """First sites of all stages but the first.

    Of all cuts whose costliest stage is within `SLACK` of the best possible, those that cut the fewest blocks; of
    these, the most even one.

    Args:
        costs: of every site.
        within_block: whether a cut before this site leaves a block open.
        num_stages: how many stages.
    """
    total = [0.0, *accumulate(costs)]  # total[i]: of the sites before i
    cap = _least_bottleneck(costs, num_stages) * (1 + SLACK)
    # best[i]: (blocks cut, sum of squared costs, start of the last stage) for the sites before i, in so many stages
    best: dict[int, tuple[int, float, int]] = {0: (0, 0.0, 0)}
    history = []
    for left in reversed(range(num_stages)):
        longer: dict[int, tuple[int, float, int]] = {}
        # each of the stages left takes a site at least, and costs the cap at most
        stops = range(
            bisect_left(total, total[-1] - (left + 1e-6) * cap) if left else len(costs), len(costs) - left + 1
        )
        for start, (blocks, squares, _) in best.items():
            blocks += start > 0 and within_block[start]
            for stop in range(max(start + 1, stops.start), stops.stop):
                cost = total[stop] - total[start]
                if cost > cap:
                    break
                found = (blocks, squares + cost**2, start)
                if stop not in longer or found < longer[stop]:
                    longer[stop] = found
        history.append(best := longer)
    starts, stop = [], len(costs)
    for each in reversed(history):
        stop = each[stop][2]
        starts.append(stop)
    return starts[-2::-1]


def _least_bottleneck(costs: Sequence[float], num_stages: int) -> float:
    """The smallest cost of the costliest stage, to a part in a million."""
    low, high = max(costs), sum(costs)
    while high - low > 1e-6 * high:
        cap = (low + high) / 2
        stages, filled = 1, 0.0
        for cost in costs:
            if filled + cost > cap:
                stages, filled = stages + 1, 0.0
            filled += cost
        low, high = (low, cap) if stages <= num_stages else (cap, high)
    return high


def _is_within_block(cut: Cut) -> bool:
    return cut.partial is not None and cut.partial not in cut.done
