"""The loss of a language model."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def next_token_nats(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """Cross entropy in nats, in fp32.

    Args:
        logits: `(B, T, V)`.
        targets: int64 `(B, T)`.
        reduction: over the tokens; with "none" the result is `(B, T)`.
    """
    nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
    return nats.view_as(targets) if reduction == "none" else nats
