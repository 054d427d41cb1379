"""How likely a model finds given continuations."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres_lit.model import Transformer


class Score(NamedTuple):
    """Of one continuation."""

    log_likelihood: float  # nats, the sum over its tokens
    greedy: bool  # whether each of its tokens is the most likely one


@torch.inference_mode()
def scores(
    model: Transformer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int = 8
) -> list[Score]:
    """Score continuations, each behind a context of its own, of which the newest `max_seq_len` tokens are read.

    Args:
        model: in eval mode.
        pairs: contexts of at least one token, and continuations.
        batch_size: rows at a time; longest first, so that rows of a batch are of about one length.

    Raises:
        ValueError: a context is empty; a continuation is longer than `max_seq_len`.
    """
    longest = model.config.max_seq_len
    for context, continuation in pairs:
        if not context:
            raise ValueError("a context is empty: give it at least one token, such as the end of a document")
        if len(continuation) > longest:
            raise ValueError(f"a continuation of {len(continuation)} tokens exceeds max_seq_len={longest}")
    rows = [[*context, *continuation][-longest - 1 :] for context, continuation in pairs]
    found = {row: Score(0.0, True) for row, (_, continuation) in enumerate(pairs) if not continuation}
    order = sorted((row for row in range(len(rows)) if row not in found), key=lambda row: -len(rows[row]))
    for first in range(0, len(order), batch_size):
        some = order[first : first + batch_size]
        features = _features(model, [rows[row][:-1] for row in some])
        for of_row, row in zip(features, some, strict=True):
            count, end = len(pairs[row][1]), len(rows[row]) - 1
            targets = torch.tensor(rows[row][len(rows[row]) - count :], dtype=torch.int64, device=of_row.device)
            found[row] = _score(model.head(of_row[end - count : end]), targets)
    return [found[row] for row in range(len(rows))]


def _features(model: Transformer, rows: Sequence[Sequence[int]]) -> Tensor:
    """What the head reads, `(B, T, D)`; rows are padded on the right, which no token before it sees."""
    longest, device = max(map(len, rows)), next(model.parameters()).device
    return model.features(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device))


def _score(logits: Tensor, targets: Tensor) -> Score:
    """Of logits `(T, V)` and the tokens that followed, `(T,)`."""
    nats = F.cross_entropy(logits.float(), targets, reduction="none").double().sum()
    return Score(-float(nats), bool((logits.argmax(-1) == targets).all()))
