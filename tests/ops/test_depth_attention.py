"""depth_attention against the reference, the known answers, and bad input."""

import pytest
import torch

from attnres_lit.ops import depth_attention, depth_attention_reference


def make(num_sources=4, shape=(2, 3), dim=12, heads=1, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()

    sources = [draw(*shape, dim) for _ in range(num_sources)]
    return sources, draw(dim) if heads == 1 else draw(heads, dim // heads), draw(dim)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("eps", [1e-6, None], ids=["key_norm", "raw_keys"])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize(("num_sources", "shape", "dim"), [(1, (2, 3), 12), (4, (2, 3), 12), (9, (5,), 15)])
def test_equals_reference(heads, eps, gain, num_sources, shape, dim):
    sources, query, key_gain = make(num_sources, shape, dim, heads)
    inputs = [*sources, query] + [key_gain] * gain
    results = []
    for function in (depth_attention_reference, depth_attention):
        out, weights = function(sources, query, key_gain if gain else None, eps=eps, return_weights=True)
        assert weights.shape == (num_sources, *shape) + ((heads,) if heads > 1 else ())
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads = torch.autograd.grad((out * probe).sum(), inputs, allow_unused=True, materialize_grads=True)
        results.append((out, weights.detach(), *grads))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_gradcheck():
    sources, query, key_gain = make(heads=2)
    assert torch.autograd.gradcheck(lambda q, g, *s: depth_attention(s, q, g), (query, key_gain, *sources))


@pytest.mark.parametrize(
    ("second", "expected"),
    [([0, 1, 0, 0], [2.94604, 0.01799, 0, 0]), ([0, 1, 1, 0], [2.94604, 0.01799, 0.01799, 0])],
)
@pytest.mark.parametrize("function", [depth_attention, depth_attention_reference])
def test_keys_are_normalised_and_values_raw(function, second, expected):
    sources = [torch.tensor([3.0, 0, 0, 0]), torch.tensor(second, dtype=torch.float32)]
    out = function(sources, torch.tensor([2.0, 0, 0, 0]))
    torch.testing.assert_close(out, torch.tensor(expected), rtol=0, atol=5e-6)


def test_zero_query_is_the_mean():
    sources, query, _ = make()
    mean = torch.stack(sources).mean(0)
    torch.testing.assert_close(depth_attention(sources, torch.zeros_like(query)), mean, rtol=0, atol=1e-15)


def test_single_source_is_the_source_itself():
    (source,), query, _ = make(1)
    assert depth_attention([source], query) is source


def test_strided_and_aliased_sources():
    base = torch.randn(3, 2, 12, dtype=torch.float64, requires_grad=True)
    strided = base.transpose(0, 1)  # (2, 3, 12), not contiguous
    query = torch.randn(12, dtype=torch.float64)
    grads = []
    for function in (depth_attention, depth_attention_reference):
        grads.append(torch.autograd.grad(function([strided, strided * 2, strided], query).sum(), base)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype):
    """fp32 inside: the result is that of the fp32 values, rounded to the source dtype; also under autocast."""
    sources, query, key_gain = make(dtype=dtype)
    exact = depth_attention([s.float() for s in sources], query.float(), key_gain.float())
    assert torch.equal(depth_attention(sources, query.float(), key_gain.float()), exact.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = depth_attention(sources, query.float(), key_gain.float())
        assert torch.equal(out, exact.to(dtype))
        out.sum().backward()
    assert all(source.grad.dtype == dtype for source in sources)


def test_saves_references_and_scalars_only():
    sources, query, key_gain = make(4, (8, 64), 256, dtype=torch.float32)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        depth_attention(sources, query, key_gain)
    own = {t.untyped_storage().data_ptr() for t in (*sources, query, key_gain)}
    extra = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)
    scalars = 3 * 4 * 8 * 64 * 4  # dots, rstd, weights; 4 sources; 8 x 64 tokens; fp32
    assert extra <= scalars + 2 * query.numel() * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, q, g: ([], q, g), "at least one source"),
        (lambda s, q, g: ([s[0], s[1][..., :6]], q, g), r"source 1 is \(2, 3, 6\)"),
        (lambda s, q, g: ([s[0], s[1].float()], q, g), "torch.float32"),
        (lambda s, q, g: (s, q[:6], g), r"D = 12, got \(6,\)"),
        (lambda s, q, g: (s, q, g[:6]), r"key_gain must be \(12,\), got \(6,\)"),
    ],
)
def test_bad_input(change, message):
    for function in (depth_attention, depth_attention_reference):
        with pytest.raises(ValueError, match=message):
            function(*change(*make()))


def test_unknown_backend():
    sources, query, _ = make()
    with pytest.raises(ValueError, match="unknown depth-attention backend 'cuda'; choose one of auto, eager"):
        depth_attention(sources, query, backend="cuda")


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("eps", [1e-6, None])
def test_decoding_a_few_tokens(heads, eps):
    sources, query, key_gain = make(heads=heads)
    expected = depth_attention(sources, query, key_gain, eps=eps)
    with torch.inference_mode():
        torch.testing.assert_close(depth_attention(sources, query, key_gain, eps=eps), expected, rtol=0, atol=1e-12)
