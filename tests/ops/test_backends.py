"""Which backend runs, what it says, and that the fused ones equal eager: outputs, gradients, saved bytes."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from attnres_lit.ops import backends, depth_attention, depth_attention_reference, eager, fla, reciprocal_rms, resolve

needs_numba = pytest.mark.skipif("compiled" not in backends.INSTALLED, reason="the extra `fast` is not installed")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make(dtype=torch.float64, shape=(3, 67), dim=33, num_sources=5):
    gen = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=gen, dtype=torch.float64)  # noqa: E731
    sources = [draw(*shape, dim).to(dtype).requires_grad_() for _ in range(num_sources)]
    wide = torch.promote_types(dtype, torch.float32)
    return sources, draw(dim).to(wide).requires_grad_(), draw(dim).to(wide).requires_grad_()


def results(sources, query, gain, **options):
    out = depth_attention(sources, query, gain, **options)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*sources, query, gain], probe)]


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_equals_eager_in_every_dtype(dtype):
    arguments = make(dtype)
    compiled, eager = (results(*arguments, backend=backend) for backend in ("compiled", "eager"))
    assert [t.dtype for t in compiled] == [t.dtype for t in eager]
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
    exact = results(*([t.double().detach().requires_grad_() for t in s] for s in (arguments[0],)), *(
        t.double().detach().requires_grad_() for t in arguments[1:]
    ), backend="eager")  # fmt: skip
    torch.testing.assert_close(compiled, exact, rtol=tolerance, atol=tolerance, check_dtype=False)


@needs_numba
def test_compiled_rounds_bfloat16_as_torch_does():
    sources, query, gain = make(torch.bfloat16)
    exact = depth_attention([s.float() for s in sources], query, gain, backend="compiled")
    assert torch.equal(depth_attention(sources, query, gain, backend="compiled"), exact.bfloat16())


@needs_numba
def test_compiled_takes_strided_aliased_and_constant_sources():
    wide = torch.randn(3, 67, 40, dtype=torch.float64, requires_grad=True)
    turned = torch.randn(67, 3, 33, dtype=torch.float64, requires_grad=True)
    constant, query = torch.randn(3, 67, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    sources = [wide[..., 3:36], turned.transpose(0, 1), wide[..., 3:36], constant]
    grads = [
        torch.autograd.grad(function(sources, query).square().sum(), (wide, turned))
        for function in (lambda *a: depth_attention(*a, backend="compiled"), depth_attention_reference)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@needs_numba
def test_compiled_does_not_depend_on_the_number_of_threads():
    arguments, before = make(torch.float32, (4, 200)), torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(results(*arguments, backend="compiled"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@needs_numba
def test_compiled_keeps_nan_and_infinity_visible():
    sources, query, gain = make(torch.bfloat16)
    with torch.no_grad():
        sources[1][0, 0, 0], sources[2][0, 1, 0] = torch.nan, torch.inf
    out = depth_attention(sources, query, gain, backend="compiled")
    assert out[0, 0].isnan().all()
    assert out[0, 1].isnan().any()
    assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=needs_numba)])
def test_a_shared_reciprocal_rms_changes_nothing(backend):
    """Not one bit: what is ahead may be dropped at any cut."""
    sources, query, gain = make(torch.float32)
    known = [reciprocal_rms(source, 1e-6, backend) for source in sources[:3]]
    assert not known[0].requires_grad
    shared = results(sources, query, gain, rstd=known, backend=backend)
    assert all(map(torch.equal, shared, results(sources, query, gain, backend=backend)))


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=needs_numba)])
def test_saves_under_a_mebibyte_beside_the_sources(backend):
    sources = [torch.randn(4, 512, 64, requires_grad=True) for _ in range(8)]
    query = torch.randn(64, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        depth_attention(sources, query, backend=backend)
    own = {t.data_ptr() for t in sources}
    assert sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own) < 2**18


def test_auto_without_numba_is_eager_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(backends, "INSTALLED", set())
    backends.notice.cache_clear()
    sources, query, gain = make()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert resolve("auto", sources) == "eager"
            depth_attention(sources, query, gain)
    assert [record.message for record in caplog.records] == [
        "depth attention runs eager; pip install 'attnres_lit[fast]' for fused kernels"
    ]


def test_a_backend_that_is_not_installed_or_on_the_wrong_device_is_refused(monkeypatch):
    sources, query, _ = make()
    for backend, extra in (("compiled", "fast"), ("fla", "cuda")):
        monkeypatch.setattr(backends, "INSTALLED", set())
        with pytest.raises(ValueError, match=rf"{backend}' needs .*attnres_lit\[{extra}\]', or choose auto or eager"):
            depth_attention(sources, query, backend=backend)
    monkeypatch.setattr(backends, "INSTALLED", {"compiled", "fla"})
    with pytest.raises(ValueError, match="'fla' needs sources on cuda, got cpu; choose auto or eager"):
        depth_attention(sources, query, backend="fla")


def test_several_heads_and_fake_tensors_run_eager(monkeypatch):
    monkeypatch.setattr(backends, "INSTALLED", {"compiled", "fla"})
    sources, _, _ = make()
    assert resolve("auto", sources) == "compiled"
    assert resolve("compiled", sources, heads=3) == "eager"
    with torch._subclasses.FakeTensorMode():
        assert resolve("auto", [torch.empty(2, 3)]) == "eager"


def test_meta_device_dry_run():
    sources = [torch.empty(2, 5, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = depth_attention(sources, torch.empty(16, device="meta"), torch.empty(16, device="meta"))
    out.sum().backward()
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 16), torch.bfloat16, "meta")
    assert sources[0].grad.shape == (2, 5, 16)


def test_export_and_one_graph():
    sources, query, gain = make(torch.float32, (2, 3), 8, 3)

    class Read(torch.nn.Module):
        def forward(self, sources, query, gain):
            return depth_attention(sources, query, gain)

    expected = depth_attention(sources, query, gain)
    with torch.no_grad():
        program = torch.export.export(Read(), (tuple(sources), query, gain))
        torch.testing.assert_close(program.module()(tuple(sources), query, gain), expected)
    torch._dynamo.reset()
    compiled = torch.compile(Read(), fullgraph=True, backend="aot_eager")
    out = compiled(tuple(sources), query, gain)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(o.square().sum(), sources, retain_graph=True) for o in (out, expected)]
    torch.testing.assert_close(grads[0], grads[1])


class TestFla:
    """The wrapper, with its two kernels replaced by formulas: the kernels themselves need a GPU."""

    @pytest.fixture(autouse=True)
    def stub(self, monkeypatch):
        def formula(query, sources, gain, eps):
            values = torch.stack(sources).float()
            rstd = (values.square().mean(-1) + eps).rsqrt()
            logit = (values * rstd.unsqueeze(-1)) @ (query * gain)
            lse = logit.logsumexp(0)
            out = ((logit - lse).exp().unsqueeze(-1) * values).sum(0).to(sources[0].dtype)
            return out, rstd, logit, lse

        def forward(query, sources, table, gain, output_gain, eps, scale, level):
            out, rstd, logit, lse = formula(query, sources, gain, eps)
            return out, None, rstd, logit, lse

        def backward(grad, query, sources, table, gain, output_gain, before, rstd, logit, lse, eps, scale, level):
            scalars = [t.reshape(*t.shape[:-2], 1, -1, 1) for t in (lse, torch.ones_like(lse), logit / rstd)]
            folded, needed = (query * gain).view(1, 1, -1), [True] * len(sources)
            grad_folded, grads, _ = eager.backward(sources, rstd.unbind(), folded, *scalars, [grad], None, (), needed)
            return grads, grad_folded.flatten() * gain, grad_folded.flatten() * query, None

        fused = SimpleNamespace(_build_ptr_table=tuple, fused_attnres_fwd=forward, fused_attnres_bwd=backward)
        attnres = SimpleNamespace(fused=fused)
        for name, module in {"fla": None, "fla.ops": None, "fla.ops.attnres": attnres}.items():
            monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())

    def test_equals_eager_with_gradients(self):
        sources, query, gain = make(torch.float32, (2, 4), 16, 3)
        out, weights = fla.depth_attention(sources, query, gain, 1e-6, True)
        expected, expected_weights = depth_attention(sources, query, gain, return_weights=True, backend="eager")
        torch.testing.assert_close((out, weights), (expected, expected_weights))
        grads = [torch.autograd.grad(o.square().sum(), [*sources, query, gain]) for o in (out, expected)]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)

    def test_is_one_graph(self):
        sources, query, gain = make(torch.float32, (2, 4), 16, 3)
        torch._dynamo.reset()
        compiled = torch.compile(fla.depth_attention, fullgraph=True, backend="aot_eager")
        out = compiled(sources, query, gain, 1e-6, False)
        expected = depth_attention(sources, query, gain, backend="eager")
        torch.testing.assert_close(out, expected)
        grads = [torch.autograd.grad(o.square().sum(), sources) for o in (out, expected)]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)

    def test_what_does_not_fit_says_why(self, caplog):
        backends.notice.cache_clear()
        (first, second), query, _ = make(torch.float32, (2, 4), 17, 2)
        assert fla.fits([first, second], query, 1e-6)
        assert not fla.fits([first, second[:, 1:]], query, 1e-6)
        assert not fla.fits([first, second], query, None)
        assert not fla.fits([first, second], query.detach().expand(2, 17), 1e-6)
        assert not fla.fits([first.double()], query, 1e-6)
        assert [r.message.split("take ")[1] for r in caplog.records] == [
            "a source that is not 16-byte aligned",
            "keys without a norm",
            "several heads",
            "torch.float64",
        ]
