"""weighted_sum equals the plain sum, with gradients, in low precision too."""

import pytest
import torch

from attnres_lit.ops import weighted_sum


def test_gradcheck_and_value():
    sources = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = sum(w * s for w, s in zip(weights, sources, strict=True))
    torch.testing.assert_close(weighted_sum(sources, weights), expected)
    assert torch.autograd.gradcheck(lambda w, *s: weighted_sum(s, w), (weights, *sources))


def test_low_precision_rounds_once():
    sources = [torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(5)]
    weights = torch.randn(5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = weighted_sum(sources, weights)
        out.sum().backward()
    exact = weighted_sum([s.detach().float() for s in sources], weights.detach())
    assert torch.equal(out, exact.bfloat16())
    torch.testing.assert_close(weights.grad, torch.stack([s.detach().float().sum() for s in sources]))


def test_bad_input():
    with pytest.raises(ValueError, match=r"weights must be \(2,\)"):
        weighted_sum([torch.ones(2), torch.ones(2)], torch.ones(3))
