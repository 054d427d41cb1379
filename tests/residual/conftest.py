"""What the tests of the strategies share."""

import random

import pytest
import torch

from residual.models import VOCAB


@pytest.fixture
def tokens():
    rng = random.Random(0)
    return torch.tensor([[rng.randrange(VOCAB) for _ in range(5)] for _ in range(2)])
