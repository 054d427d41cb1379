"""Two phases are a schedule: the same sums and gradients as one-shot reads, for every way to cut the depth."""

from functools import partial

import pytest
import torch

from attnres_lit.residual import BlockAttnRes, FullAttnRes, Sources, attnres
from residual.models import build, loss_of, scatter

CASES = [
    (BlockAttnRes, {"block_size": 2}),
    (BlockAttnRes, {"block_size": 5}),
    (BlockAttnRes, {"num_blocks": 3, "num_heads": 4}),
    (BlockAttnRes, {"boundaries": [1, 4, 5], "key_norm": False}),
    (FullAttnRes, {}),
    (FullAttnRes, {"num_heads": 2, "key_norm": False}),
]


def logits_and_grads(model, tokens, drop_ahead_at=None):
    sources = model.residual.open(model.embed(tokens))
    for site in range(model.residual.num_sites):
        if site == drop_ahead_at:
            sources = Sources(sources.done, sources.partial)
        sources = model.run(sources, site)
    logits = model.head(model.norm(model.residual.exit(sources)))
    grads = torch.autograd.grad(loss_of(logits), list(model.parameters()))
    return [logits.detach(), *grads]


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize(("strategy", "options"), CASES)
def test_equals_one_shot_with_gradients_wherever_ahead_is_dropped(tokens, strategy, options, backend):
    one_shot, two_phase = (scatter(build(partial(strategy, two_phase=mode, **options))) for mode in (False, True))
    two_phase.residual.depth_backend = one_shot.residual.depth_backend = backend
    expected = logits_and_grads(one_shot, tokens)
    for site in (None, 2, 5, 6, 7):
        torch.testing.assert_close(logits_and_grads(two_phase, tokens, site), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "seen"), [(partial(BlockAttnRes, block_size=3), [2, 3, 4]), (FullAttnRes, [4, 7, 10])]
)
def test_a_run_reads_the_finished_sources_once(tokens, monkeypatch, strategy, seen):
    calls = []

    def spy(sources, queries, *args, **kwargs):
        calls.append((len(sources), len(queries)))
        return inter_block_reads(sources, queries, *args, **kwargs)

    inter_block_reads = attnres.inter_block_reads
    monkeypatch.setattr(attnres, "inter_block_reads", spy)
    build(partial(strategy, two_phase=True))(tokens)
    assert calls == [(count, 3) for count in seen]


def test_the_statistics_of_a_site_are_let_go_when_it_is_read():
    residual = BlockAttnRes(9, 4, block_size=3, two_phase=True)
    sources, held = residual.open(torch.randn(1, 1, 4)), []
    for site in range(9):
        h, note = residual.read(sources, site)
        sources = residual.write(sources, h, site, note)
        held.append(sum(t.dim() == 3 for t in sources.ahead))
    assert held == [0, 0, 0, 2, 1, 0, 2, 1, 0]
    assert len(sources.ahead) == len(sources.done) - 1  # the reciprocal RMS of all but the newest


def test_the_reciprocal_rms_of_a_source_is_computed_once(tokens, monkeypatch):
    engine_of, computed = attnres.complete_rstd, []
    monkeypatch.setattr(
        attnres,
        "complete_rstd",
        lambda done, known, *rest: computed.append(len(done) - len(known)) or engine_of(done, known, *rest),
    )
    build(partial(FullAttnRes, two_phase=False))(tokens)
    assert computed == [2, *[1] * 11]  # sites 1 to 11 and the exit


def test_auto_takes_two_phases_from_the_measured_size(tokens, monkeypatch):
    calls = []
    monkeypatch.setattr(attnres.AttnRes, "_phase_one", lambda *args: calls.append(args) or ())
    model = build(partial(BlockAttnRes, block_size=3))
    model(tokens)
    assert not calls
    monkeypatch.setattr(attnres, "TWO_PHASE_FROM", tokens.numel() * 16)
    model(tokens)
    assert len(calls) == 3
    model.residual.recomputed = True
    model(tokens)
    assert len(calls) == 3


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="two_phase='yes' must be auto, true or false"):
        BlockAttnRes(6, 8, two_phase="yes")
    with pytest.raises(ValueError, match="two_phase=true needs every source to stay: window=2 must be null"):
        FullAttnRes(6, 8, window=2, two_phase=True)


@pytest.mark.parametrize("strategy", [partial(BlockAttnRes, block_size=3), FullAttnRes])
def test_in_inference_phases_are_for_those_who_ask(tokens, monkeypatch, strategy):
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return inter_block_reads(*args, **kwargs)

    inter_block_reads = attnres.inter_block_reads
    monkeypatch.setattr(attnres, "inter_block_reads", spy)
    monkeypatch.setattr(attnres, "TWO_PHASE_FROM", 1)
    auto, asked = (scatter(build(partial(strategy, two_phase=mode))) for mode in ("auto", True))
    with torch.inference_mode():
        alone = auto(tokens)
        assert not calls
        torch.testing.assert_close(asked(tokens), alone, rtol=1e-10, atol=1e-12)
    assert len(calls) == 3
