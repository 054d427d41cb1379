"""Traffic against the report: Eq. 7 and 8, Figure 3, and the least there can be."""

import pytest

from attnres_lit.parallel.cost_model import boundaries
from attnres_lit.parallel.depth import Cut, trace
from attnres_lit.parallel.traffic import traffic
from attnres_lit.residual import BlockAttnRes, DenseFormer, FullAttnRes

LAYOUTS = [(ranks, virtual) for ranks in (2, 4, 8) for virtual in (1, 2, 4)]


def sources_crossing(ranks, virtual, sites_per_block=1, embedding=True, partial=True):
    """(naive, Eq. 8, exact) of every boundary, one site a stage."""
    sites = ranks * virtual
    depth = trace(BlockAttnRes(sites, 1, block_size=sites_per_block))
    cuts = [Cut(cut.done[not embedding :], cut.partial if partial else None) for cut in depth.cuts]
    stages = [range(site, site + 1) for site in range(sites)]
    return boundaries(depth._replace(cuts=tuple(cuts)), stages, ranks)


def totals(crossing):
    return tuple(sum(column) for column in zip(*crossing, strict=True))


@pytest.mark.parametrize(("ranks", "virtual"), LAYOUTS)
def test_closed_forms(ranks, virtual):
    chunks = ranks * virtual
    naive = chunks * (chunks - 1) // 2  # Eq. 7
    report = ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2  # Eq. 8
    exact = ranks * (ranks - 1) // 2 + (virtual - 1) * ranks * (ranks - 1)
    assert totals(sources_crossing(ranks, virtual, embedding=False)) == (naive, report, exact)
    found = totals(sources_crossing(ranks, virtual))
    assert found == (naive + chunks - 1, report + ranks - 1, exact + ranks - 1)


def test_the_whole_table():
    without = [(1, 1, 1), (6, 5, 3), (28, 13, 7), (6, 6, 6), (28, 22, 18), (120, 54, 42)]
    without += [(28, 28, 28), (120, 92, 84), (496, 220, 196)]
    whole = [(2, 2, 2), (9, 6, 4), (35, 14, 8), (9, 9, 9), (35, 25, 21), (135, 57, 45)]
    whole += [(35, 35, 35), (135, 99, 91), (527, 227, 203)]
    assert [totals(sources_crossing(*layout, embedding=False)) for layout in LAYOUTS] == without
    assert [totals(sources_crossing(*layout)) for layout in LAYOUTS] == whole


def test_figure_3():
    """P 4, V 2, a block spans two stages."""
    crossing = sources_crossing(4, 2, sites_per_block=2, partial=False)
    assert totals(crossing) == (19, 13, 11)
    assert totals(crossing[3:]) == (14, 8, 6)  # into the second pass
    assert [each.naive for each in crossing[3:]] == [3, 3, 4, 4]
    assert totals(sources_crossing(4, 2, sites_per_block=2)) == (23, 17, 15)


def test_blocks_of_two_stages():
    assert totals(sources_crossing(8, 4, sites_per_block=2, embedding=False, partial=False)) == (240, 108, 96)


def test_the_peak_falls_from_chunks_to_ranks():
    crossing = sources_crossing(8, 4, embedding=False)
    assert max(each.naive for each in crossing) == 31
    assert max(each.received for each in crossing) == 8
    assert max(each.exact for each in crossing) == 7


@pytest.mark.parametrize("residual", [BlockAttnRes, FullAttnRes, DenseFormer])
@pytest.mark.parametrize("cache", [False, True])
def test_every_stage_has_what_it_reads(residual, cache):
    """Replayed: a stage gets each of its tensors by the wire or from its rank, never both; nothing is kept in vain."""
    depth = trace(residual(16, 4))
    cuts = depth.cuts[2:-1:2]
    for ranks in (1, 2, 4):
        held = [set() for _ in range(ranks)]
        stages = traffic(cuts, ranks, cache)
        carried = [(), *(cut.tensors for cut in cuts)]
        for index, stage in enumerate(stages):
            at_hand = held[index % ranks]
            assert sorted((*stage.received, *stage.cached)) == sorted(carried[index])
            assert set(stage.cached) <= at_hand
            at_hand |= set(stage.kept)
            assert stage.sent == (stages[index + 1].received if index + 1 < len(stages) else ())
            later = {i for each in stages[index + ranks :: ranks] for i in each.cached}
            assert set(stage.kept) <= later
            if not cache:
                assert not stage.cached
                assert not stage.kept
