"""Sinkhorn: doubly stochastic, last axis exact, in fp32, without overflow."""

import torch

from attnres_lit.ops import sinkhorn


def plain_sinkhorn(logits, num_iters):
    matrix = logits.exp()
    for _ in range(num_iters):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def test_equals_the_plain_iteration_with_gradients():
    logits = torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for function in (sinkhorn, plain_sinkhorn):
        out = function(logits, 20)
        probe = torch.arange(80, dtype=torch.float64).view(5, 4, 4)
        results.append((out.detach(), torch.autograd.grad((out * probe).sum(), logits)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


def test_last_axis_is_exact_and_the_other_converges():
    logits = torch.randn(4096, 4, 4, generator=torch.Generator().manual_seed(0))
    for std, bound in ((0.1, 1e-6), (1.0, 2e-3)):
        matrix = sinkhorn(logits * std)
        assert (matrix.sum(-1) - 1).abs().max() < 1e-6
        assert (matrix.sum(-2) - 1).abs().max() < bound
    few = sinkhorn(logits, num_iters=1)
    assert (few.sum(-1) - 1).abs().max() < 1e-6
    assert (few.sum(-2) - 1).abs().max() > 1e-2


def test_large_logits_and_low_precision():
    huge = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]], requires_grad=True)
    out = sinkhorn(huge)
    torch.testing.assert_close(out, torch.eye(2))
    out.sum().backward()
    assert huge.grad.isfinite().all()
    assert sinkhorn(torch.zeros(4, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_saves_the_logits_only():
    logits, saved = torch.randn(8, 4, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sinkhorn(logits)
    assert [t.data_ptr() for t in saved] == [logits.data_ptr()]


def test_gradcheck_where_columns_have_not_converged():
    logits = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.autograd.gradcheck(sinkhorn, (logits.requires_grad_(), 3))
    assert torch.autograd.gradcheck(sinkhorn, (logits, 1))


def test_no_row_or_column_is_ever_divided_by_nothing():
    """All mass in one column, and a cycle that needs the last bits: the plain iteration divides zero by zero."""
    one_column = torch.tensor([[1000.0, 0.0, 0.0], [1000.0, 0.0, 0.0], [1000.0, 0.0, 0.0]], requires_grad=True)
    out = sinkhorn(one_column)
    torch.testing.assert_close(out, torch.full((3, 3), 1 / 3))
    out.square().sum().backward()
    assert one_column.grad.isfinite().all()
