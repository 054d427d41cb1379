"""Two-phase depth attention equals one-shot, and loses nothing where logits are large."""

import math

import pytest
import torch

from attnres_lit.ops import DepthStats, depth_attention, inter_block_attention, merge_partial


@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize("eps", [1e-6, None])
def test_two_phase_equals_one_shot(gains, eps):
    gen = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=gen, dtype=torch.float64).requires_grad_()  # noqa: E731
    sources, partial = [draw(2, 3, 8) for _ in range(4)], draw(2, 3, 8)
    queries, key_gains = draw(3, 8), draw(3, 8)
    inputs = [*sources, partial, queries] + [key_gains] * gains
    gain = (lambda i: key_gains[i]) if gains else (lambda i: None)

    stats = inter_block_attention(sources, queries, key_gains if gains else None, eps=eps)
    assert stats.out.shape == (3, 2, 3, 8)
    assert stats.max.shape == stats.denom.shape == (3, 2, 3)
    two_phase = [stats.out[0] / stats.denom[0].unsqueeze(-1)]
    two_phase += [merge_partial(stats, i, partial, queries[i], gain(i), eps=eps) for i in (1, 2)]
    one_shot = [depth_attention(sources, queries[0], gain(0), eps=eps)]
    one_shot += [depth_attention([*sources, partial], queries[i], gain(i), eps=eps) for i in (1, 2)]

    torch.testing.assert_close(two_phase, one_shot, rtol=0, atol=1e-12)
    probe = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)
    grads = [torch.autograd.grad(sum((h * probe).sum() for h in reads), inputs) for reads in (two_phase, one_shot)]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("difference", [1.0, -1.0, 0.0])
def test_logits_near_2_to_24_merge_without_loss(difference):
    """A log-sum-exp of these statistics would round to 2**24 in fp32 and forget the denominator 3."""
    base = 2.0**24 - 2  # this and its neighbours are exact in fp32
    out, denom = torch.tensor([[6.0, 0.0]]), torch.tensor([3.0])  # three sources of mean [2, 0]
    stats = DepthStats(out, torch.tensor([base]), denom)
    partial = torch.tensor([1.0, 5.0])
    merged = merge_partial(stats, 0, partial, torch.tensor([base + difference, 0.0]), eps=None)
    share = math.exp(difference) / (3 + math.exp(difference))
    expected = torch.tensor([2 * (1 - share) + share, 5 * share])
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=0)


def test_low_precision_statistics_are_fp32_and_the_merge_is_not():
    sources = [torch.randn(2, 8, dtype=torch.bfloat16) for _ in range(3)]
    queries = torch.randn(2, 8)
    stats = inter_block_attention(sources[:2], queries)
    assert {t.dtype for t in stats} == {torch.float32}
    merged = merge_partial(stats, 1, sources[2], queries[1])
    torch.testing.assert_close(merged, depth_attention(sources, queries[1]))
    assert merged.dtype == torch.bfloat16


def test_bad_input():
    sources, queries = [torch.randn(2, 8)], torch.randn(3, 8)
    with pytest.raises(ValueError, match="at least one source"):
        inter_block_attention([], queries)
    with pytest.raises(ValueError, match=r"D = 8, got \(4,\)"):
        inter_block_attention(sources, queries[:, :4])
    with pytest.raises(ValueError, match=r"key_gains must be \(3, 8\)"):
        inter_block_attention(sources, queries, queries[:2])
