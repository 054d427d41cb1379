"""The simulated step against what is known in closed form."""

import itertools
from collections import Counter

import pytest

from attnres_lit.parallel.settings import SCHEDULES, SINGLE, PipelineSettings, check_pipeline
from attnres_lit.parallel.simulate import Action, orders, peaks, simulate

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def step(settings, transfer=0.0, latency=0.0):
    return simulate(orders(settings), [UNIT] * settings.num_stages, [transfer] * (settings.num_stages - 1), latency)


def settings_of(schedule):
    for ranks, virtual, count in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8)):
        settings = PipelineSettings(ranks, count, schedule, virtual)
        try:
            check_pipeline(settings)
        except ValueError:
            continue
        yield settings


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_runs_once_after_what_it_needs(schedule):
    for settings in settings_of(schedule):
        stop, last = {}, settings.num_stages - 1
        done = step(settings, transfer=0.3, latency=0.1)
        for span in done.spans:
            kind = {"I": "B"}.get(span.kind, span.kind)
            assert (span.stage, kind, span.microbatch) not in stop
            assert span.rank == span.stage % settings.pipeline_parallel_size
            stop[span.stage, kind, span.microbatch] = span.stop
        for span in done.spans:
            needs = []
            if span.kind == "F" and span.stage > 0:
                needs = [((span.stage - 1, "F", span.microbatch), settings.pipeline_parallel_size > 1)]
            if span.kind in "BI":
                needs = [((span.stage, "F", span.microbatch), False)]
                if span.stage < last:
                    needs += [((span.stage + 1, "B", span.microbatch), settings.pipeline_parallel_size > 1)]
            if span.kind == "W":
                needs = [((span.stage, "B", span.microbatch), False)]
            for need, crosses in needs:
                assert span.start >= stop[need] + 0.4 * crosses - 1e-9
        work = Counter(span.kind for span in done.spans)
        assert work["F"] == work["B"] + work["I"] == settings.num_stages * settings.num_microbatches
        assert work["I"] == work["W"]
        for rank in range(settings.pipeline_parallel_size):
            spans = [span for span in done.spans if span.rank == rank]
            assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("schedule", SINGLE)
def test_bubble_of_one_stage_a_rank(schedule):
    for settings in settings_of(schedule):
        ranks, count = settings.pipeline_parallel_size, settings.num_microbatches
        assert step(settings).bubble == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_virtual_stages_divide_the_bubble(schedule):
    ranks, count = 4, 8
    for virtual in (1, 2, 4):
        bubble = step(PipelineSettings(ranks, count, schedule, virtual)).bubble
        assert bubble == pytest.approx((ranks - 1) / (virtual * count + ranks - 1))


def test_zero_bubble_waits_less():
    for virtual in (1, 2, 4):
        layouts = [PipelineSettings(4, 8, name, virtual) for name in ("InterleavedZeroBubble", "Interleaved1F1B")]
        assert step(layouts[0]).bubble < step(layouts[1]).bubble / 2


def test_links_cost_time_and_overlap_with_compute():
    for name, extra in (("GPipe", 3 + 3), ("LoopedBFS", 3 + 3)):  # hidden, but for the fill and the drain
        settings = PipelineSettings(4, 32, name)
        assert step(settings, transfer=0.75, latency=0.25).seconds == step(settings).seconds + extra
    settings = PipelineSettings(4, 32, "1F1B")  # waits for every answer of the next rank
    assert step(settings).seconds < step(settings, transfer=0.5).seconds < step(settings).seconds + 32 * 2 * 0.5
    # a link that takes longer than the compute sets the pace: 32 outputs and 32 gradients through every rank
    assert step(settings, transfer=4.0).seconds > 32 * 2 * 4.0
    # on a single rank nothing is sent
    alone = PipelineSettings(1, 4, "Interleaved1F1B", 3)
    assert step(alone, transfer=9.0, latency=9.0).seconds == 4 * 3 * 3


def test_by_hand():
    """Two ranks, one microbatch: forward, transfer, forward and backward, transfer, backward."""
    done = simulate(orders(PipelineSettings(2, 1, "GPipe")), [UNIT] * 2, [0.25], 0.5)
    assert [(s.rank, s.kind, s.start, s.stop) for s in sorted(done.spans, key=lambda s: s.start)] == [
        (0, "F", 0.0, 1.0),
        (1, "F", 1.75, 2.75),
        (1, "B", 2.75, 4.75),
        (0, "B", 5.5, 7.5),
    ]
    assert done.bubbles == [1 - 3 / 7.5] * 2


def test_actions_that_wait_for_one_another():
    with pytest.raises(ValueError, match="wait for one another"):
        simulate([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], [UNIT] * 2, [0.0])


def test_microbatches_in_flight():
    held = {name: peaks(orders(PipelineSettings(4, 8, name)), [1.0] * 4) for name in SCHEDULES}
    assert held["GPipe"] == held["LoopedBFS"] == [8] * 4
    assert held["1F1B"] == [4, 3, 2, 1]
    assert held["InterleavedZeroBubble"] == [4] * 4


def test_64_ranks_of_8_virtual_stages():
    settings = PipelineSettings(64, 64, "Interleaved1F1B", 8)
    done = step(settings)
    assert len(done.spans) == 2 * 512 * 64
    assert done.bubble == pytest.approx(63 / (8 * 64 + 63))
