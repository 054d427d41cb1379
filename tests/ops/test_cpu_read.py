"""The read of inference equals the formula, and leaves to others what it does not take."""

import pytest
import torch

from attnres_lit.ops import backends, depth_attention, depth_attention_reference
from attnres_lit.ops.depth_attention import read_alone

pytestmark = pytest.mark.skipif("compiled" not in backends.INSTALLED, reason="the extra `fast` is not installed")


def make(dtype=torch.float32, shape=(2, 3), dim=33, num_sources=5, wide=torch.float32):
    gen = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=gen, dtype=torch.float64)  # noqa: E731
    return [draw(*shape, dim).to(dtype) for _ in range(num_sources)], draw(dim).to(wide), draw(dim).to(wide)


@torch.inference_mode()
def both(sources, query, gain, eps=1e-6):
    wide = [[source.double() for source in sources], query.double(), None if gain is None else gain.double()]
    alone = read_alone(sources, query, gain, eps, "auto")
    assert alone is not None
    assert alone.dtype == sources[0].dtype
    assert depth_attention(sources, query, gain, eps=eps).equal(alone)
    return alone.double(), depth_attention_reference(*wide, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_formula_in_every_dtype(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    for query_dtype in {wide, dtype}:
        torch.testing.assert_close(*both(*make(dtype, wide=query_dtype)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (3, 67), (0, 4)])
@pytest.mark.parametrize("num_sources", [1, 2, 25])
def test_equals_the_formula_for_any_number_of_tokens_and_sources(shape, num_sources):
    sources, query, gain = make(shape=shape, num_sources=num_sources)
    torch.testing.assert_close(*both(sources, query, gain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*both(sources, query, None, None), rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow():
    sources, query, gain = make()
    torch.testing.assert_close(*both(sources, 1e4 * query, gain), rtol=1e-5, atol=1e-5)


def test_what_it_does_not_take_is_read_otherwise():
    sources, query, gain = make(shape=(4, 700))
    strided = [torch.stack([source, source], -1)[..., 0] for source in sources]
    with torch.inference_mode():
        expected = depth_attention(sources, query, gain)
        assert read_alone(strided, query, gain, 1e-6, "auto") is None
        assert read_alone(sources, query, gain, 1e-6, "eager") is None
        torch.testing.assert_close(depth_attention(strided, query, gain), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="sources must agree"):
            depth_attention([sources[0], sources[1].double()], query, gain)
        with pytest.raises(ValueError, match="query must be"):
            depth_attention(sources, query[:-1], None)
    assert read_alone(sources, query, gain, 1e-6, "auto") is None  # a backward may follow


def test_on_two_threads():
    sources, query, gain = make(shape=(3, 100))
    expected, _ = both(sources, query, gain)
    torch.set_num_threads(2)
    try:
        found, _ = both(sources, query, gain)
    finally:
        torch.set_num_threads(1)
    assert found.equal(expected)
