"""What attention keeps of earlier tokens, so that the next one costs a forward of one token.

A slot is a position: token p of a row lies in slot p, whatever the lengths of the other rows, and a token sees the
slots up to its own. So rows of different lengths need neither padding in the cache nor shifted positions: what a short
row was padded with lies behind its end, in slots that no token sees before they are written again.

Nothing of depth is kept: the sources of a token live inside one forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres_lit.model.config import TransformerConfig


class Slots(NamedTuple):
    """What one attention sublayer has of earlier tokens, and where the new ones go."""

    keys: Tensor  # (B, slots, KV heads, head_dim)
    values: Tensor
    where: tuple[Any, Any]  # rows and slots of the new tokens, as an index of the first two axes
    positions: Any  # of the new tokens, as an index of the rotary tables: a slice, or (B, 1, T)
    seen: int  # slots that any token may see
    mask: Tensor | None  # (B, 1, T, seen), true where a token sees a slot; None: all of `seen`, causally

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of the new tokens, `(B, KV heads, T, head_dim)`; return all, `(B, KV heads, seen, head_dim)`."""
        self.keys[self.where] = keys.transpose(1, 2)
        self.values[self.where] = values.transpose(1, 2)
        return self.keys[:, : self.seen].transpose(1, 2), self.values[:, : self.seen].transpose(1, 2)


Past = Mapping[int, tuple[Slots]]  # by site; a site without attention has none
NO_PAST: Past = {}


class KVCache:
    """Keys and values of every attention sublayer of a model, for a batch of rows.

        past = cache.past(T)                 # where the next T tokens of every row go
        logits = model(tokens, past)         # tokens (B, T)
        cache.advance([T] * B)               # how many of them count; the others are as if they had not been

    Args:
        config: of the model.
        rows: B.
        slots: tokens that a row may grow to.
        dtype: of the model's sources.
        device: of the model.

    Raises:
        ValueError: more slots than `max_seq_len`.
    """

    def __init__(
        self, config: TransformerConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if slots > config.max_seq_len:
            raise ValueError(f"{slots} tokens exceed max_seq_len={config.max_seq_len}")
        shape = (rows, slots, config.num_kv_heads or config.num_heads, config.head_width)
        self.slots = slots
        self.lengths = [0] * rows
        self.device = device
        self._kept = {
            site: (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for site in range(0, config.num_sites, 2)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._kept.values())

    def past(self, tokens: int) -> Past:
        """What a forward of `(B, tokens)` needs. Raises ValueError where the longest row would outgrow its slots."""
        seen = max(self.lengths) + tokens
        if seen > self.slots:
            raise ValueError(f"{seen} tokens exceed the {self.slots} slots of the cache")
        if min(self.lengths) == max(self.lengths):  # no row is told apart: plain slices
            span = slice(self.lengths[0], seen)
            where, positions, mask = (slice(None), span), span, None
            if tokens > 1 and span.start:
                mask = self._visible(torch.arange(span.start, seen, device=self.device).view(1, 1, -1), seen)
        else:
            begins = torch.tensor(self.lengths, device=self.device)
            at = begins[:, None] + torch.arange(tokens, device=self.device)  # (B, T)
            where = (torch.arange(len(self.lengths), device=self.device)[:, None], at)
            positions = at.unsqueeze(1)  # (B, 1, T)
            mask = self._visible(positions, seen)
        return {site: (Slots(*kept, where, positions, seen, mask),) for site, kept in self._kept.items()}

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[row]` of the tokens that the last forward wrote."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        self._kept = {site: (keys[index], values[index]) for site, (keys, values) in self._kept.items()}

    def _visible(self, positions: Tensor, seen: int) -> Tensor:
        """`(B, 1, T)` to `(B, 1, T, seen)`."""
        return torch.arange(seen, device=self.device) <= positions.unsqueeze(-1)
