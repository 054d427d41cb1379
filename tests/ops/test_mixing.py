"""The ablations of depth attention, and mixtures of permutations, by numbers worked out by hand."""

import pytest
import torch

from attnres_lit.ops import depth_attention, depth_read, permutation_mixture

SOURCES = [torch.tensor([3.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])]


def test_the_softmax_of_static_queries_is_depth_attention_itself():
    assert depth_read("static", "softmax", 1) is depth_attention


def test_sigmoids_do_not_compete():
    """Keys of RMS 1 and a query of 2 on the first axis: logits 4 and 0."""
    query = torch.tensor([2.0, 0.0, 0.0, 0.0])
    out, weights = depth_read("static", "sigmoid", 1)(SOURCES, query, eps=1e-12, return_weights=True)
    torch.testing.assert_close(weights, torch.tensor([0.9820138, 0.5]))
    torch.testing.assert_close(out, torch.tensor([3 * 0.9820138, 0.5, 0.0, 0.0]))


def test_a_query_from_the_input_is_a_matrix_times_the_newest_source():
    """The newest key is (0, 2, 0, 0); a matrix that maps axis 1 to axis 0 makes the query (2, 0, 0, 0) / 4."""
    matrix = torch.zeros(4, 4)
    matrix[0, 1] = 1.0
    read = depth_read("input", "softmax", 1)
    _, weights = read(SOURCES, matrix, eps=1e-12, return_weights=True)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.0]).softmax(0))
    _, weights = read(SOURCES, matrix, eps=None, return_weights=True)  # query (1, 0, 0, 0) / 4, keys as they are
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.0]).softmax(0))


def test_learned_numbers_weigh_alike_for_every_token():
    numbers = torch.tensor([[1.0, 2.0], [0.0, 0.0]])  # two heads, two sources
    sources = [torch.randn(2, 3, 4) for _ in range(2)]
    out, weights = depth_read("static", "static", 2)(sources, numbers, eps=None, return_weights=True)
    assert weights.shape == (2, 2, 3, 2)
    assert torch.equal(weights, numbers.softmax(1).T.view(2, 1, 1, 2).expand(2, 2, 3, 2))
    torch.testing.assert_close(out[..., 2:], (sources[0] + sources[1])[..., 2:] / 2)


@pytest.mark.parametrize(("query", "mixing"), [("input", "softmax"), ("static", "sigmoid"), ("static", "static")])
def test_backward_keeps_references_to_the_sources_and_no_copies(query, mixing):
    sources = [torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(5)]
    parameter = torch.zeros({"input": (8, 8), "static": (8,)}[query] if mixing != "static" else (5,)).requires_grad_()
    storages = {tensor.untyped_storage().data_ptr() for tensor in (parameter, *sources)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = depth_read(query, mixing, 1)(sources, parameter)
    saved = [each for each in out.grad_fn.saved_tensors if each is not None]
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} <= storages


@pytest.mark.parametrize(
    ("query", "mixing", "message"),
    [
        ("dynamic", "softmax", "got query=dynamic, mixing=softmax"),
        ("static", "relu", "got query=static, mixing=relu"),
        ("input", "static", "mixing=static has no queries: set query to static"),
    ],
)
def test_what_does_not_go_together(query, mixing, message):
    with pytest.raises(ValueError, match=message):
        depth_read(query, mixing, 1)


def test_permutations():
    """Of three: the identity has logit 0, and (1, 2, 0), which takes stream 1 to place 0, is fourth."""
    logits = torch.full((6,), -torch.inf)
    logits[3] = 0.0
    assert torch.equal(permutation_mixture(logits), torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]))
    logits[0] = 0.0
    expected = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])
    assert torch.equal(permutation_mixture(logits), expected)


def test_permutations_are_doubly_stochastic_whatever_the_logits():
    matrix = permutation_mixture(8 * torch.randn(64, 24, dtype=torch.float64))
    assert matrix.shape == (64, 4, 4)
    for axis in (-1, -2):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(64, 4, dtype=torch.float64), rtol=0, atol=1e-14)


def test_logits_that_are_no_permutations():
    with pytest.raises(ValueError, match="permutations need n! logits, got 16"):
        permutation_mixture(torch.zeros(16))
