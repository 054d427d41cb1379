"""From logits to the next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: penalty, then temperature, then top-k, then top-p.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from this many most likely tokens; None: from all.
        top_p: draw from the fewest tokens that together have this probability (nucleus sampling, arXiv 1904.09751).
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that are there already
            (arXiv 1909.05858); 1 leaves them as they are.
        seed: of the draws; row i of a batch draws with seed + i, whatever the other rows are.

    Raises:
        ValueError: an option is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be at least 0; 0 takes the most likely token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 changes nothing")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be between 0 and 2**63 - 1")

    def generator(self, row: int) -> torch.Generator:
        """Of the draws of a row, on the CPU, so that they do not depend on the device."""
        return torch.Generator().manual_seed(self.seed + row)

    def draw(self, logits: Tensor, seen: Sequence[int], generator: torch.Generator) -> int:
        """The next token of one row.

        Args:
            logits: `(V,)`.
            seen: the tokens of the row so far.
            generator: of the row.
        """
        logits = logits.to("cpu", torch.float32)
        if not logits.isfinite().all():
            raise ValueError("the model's output is not finite: its training has diverged")
        if self.repetition_penalty != 1:
            ids = torch.tensor(sorted(set(seen)))
            repeated = logits[ids]
            penalised = torch.where(
                repeated > 0, repeated / self.repetition_penalty, repeated * self.repetition_penalty
            )
            logits = logits.index_copy(0, ids, penalised)
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = self.probabilities(logits)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of all tokens, from fp32 logits `(V,)`, at a temperature above 0."""
        logits = (logits - logits.max()) / self.temperature  # 0 at most: a tiny temperature does not overflow upwards
        ranked, order = logits.sort(descending=True, stable=True)
        probabilities = ranked[: self.top_k].softmax(0)
        before = probabilities.cumsum(0, dtype=torch.float64) - probabilities
        kept = torch.where((before < self.top_p) | (self.top_p == 1), probabilities, 0)  # the first is always kept
        return torch.zeros_like(logits).index_copy(0, order[: self.top_k], kept / kept.sum())
