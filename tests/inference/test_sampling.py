"""How a token is drawn."""

import pytest
import torch

from attnres_lit.inference import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def test_probabilities_of_temperature_top_k_and_top_p():
    torch.testing.assert_close(Sampling().probabilities(LOGITS), LOGITS.softmax(0))
    torch.testing.assert_close(Sampling(temperature=0.5).probabilities(LOGITS), (2 * LOGITS).softmax(0))
    two = torch.tensor([*LOGITS[:2].softmax(0), 0, 0])
    torch.testing.assert_close(Sampling(top_k=2).probabilities(LOGITS), two)
    assert LOGITS.softmax(0)[0] < 0.7 < LOGITS.softmax(0)[:2].sum()
    torch.testing.assert_close(Sampling(top_p=0.7).probabilities(LOGITS), two)
    torch.testing.assert_close(Sampling(top_p=1e-9).probabilities(LOGITS), torch.eye(4)[0])
    torch.testing.assert_close(Sampling(top_k=1).probabilities(torch.ones(4)), torch.eye(4)[0])  # ties: the first
    assert Sampling(temperature=1e-30).probabilities(LOGITS).equal(torch.eye(4)[0])


def test_the_order_of_the_vocabulary_does_not_matter():
    order = torch.tensor([2, 0, 3, 1])
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9)
    torch.testing.assert_close(sampling.probabilities(LOGITS[order]), sampling.probabilities(LOGITS)[order])


def test_draws_follow_the_probabilities_and_the_seed():
    sampling = Sampling(top_k=3, seed=3)
    generator = sampling.generator(0)
    counts = torch.zeros(4)
    for _ in range(2000):
        counts[sampling.draw(LOGITS, [], generator)] += 1
    torch.testing.assert_close(counts / 2000, sampling.probabilities(LOGITS), rtol=0, atol=0.04)
    first, second = (Sampling(seed=seed).generator(row).initial_seed() for seed, row in ((3, 1), (4, 0)))
    assert first == second


def test_a_repeated_token_is_penalised_once_on_either_side_of_zero():
    sampling = Sampling(temperature=0, repetition_penalty=4.0)
    assert sampling.draw(LOGITS, [0, 0], torch.Generator()) == 1
    assert sampling.draw(torch.tensor([-1.0, -2.0]), [0], torch.Generator()) == 1
    assert sampling.draw(torch.tensor([-1.0, -5.0]), [0], torch.Generator()) == 0
    assert LOGITS[0] == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
    ],
)
def test_refuses(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Sampling(**options)
