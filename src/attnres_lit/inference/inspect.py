"""A look inside a trained model: where its parameters are, and what its depth does with a text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnres_lit.data.tokenizers import Tokenizer
from attnres_lit.inference.generate import stream
from attnres_lit.inference.sampling import Sampling
from attnres_lit.inference.watch import observe, record, roots
from attnres_lit.model import Transformer
from attnres_lit.model.runner import Part


@dataclass(frozen=True)
class Insight:
    """What a model does with one text of T tokens.

    Attributes:
        parameters: how many there are of each part; a tied head counts with the embedding.
        tokens: the text of each token.
        weights: depth-attention weights by site and source, `(T,)` each, means of heads; the exit is site `num_sites`.
            Empty for a strategy without depth attention.
        rms: root mean square of what is written after each layer.
    """

    parameters: dict[str, int]
    tokens: list[str]
    weights: dict[int, dict[int, np.ndarray]]
    rms: dict[int, float]

    @property
    def means(self) -> dict[int, dict[int, float]]:
        """The weights, averaged over the tokens."""
        return {site: {at: float(w.mean()) for at, w in row.items()} for site, row in self.weights.items()}


@torch.inference_mode()
def look_inside(model: Transformer, tokenizer: Tokenizer, text: str | None = None, length: int = 64) -> Insight:
    """Run a model on a text and watch its depth.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        text: what to read; None: what the model itself writes, from the beginning of a document on.
        length: tokens it then writes.

    Raises:
        ValueError: the text is empty, or longer than `max_seq_len`.
    """
    if text is None:
        length = min(length, model.config.max_seq_len - 1)
        written = stream(model, [[tokenizer.eod]], length, Sampling(temperature=0.8), tokenizer.eod)
        ids = [tokenizer.eod, *(token for step in written for token in step.values())]
    else:
        ids = tokenizer.encode(text).tolist()
    if not ids:
        raise ValueError("the prompt is empty: give it at least one token, or leave it out")
    with observe(model.residual) as squares, record(Part(model.residual), keep=_heads_mean) as rows:
        model(torch.tensor([ids], device=next(model.parameters()).device))
    return Insight(
        parameters=count_parameters(model),
        tokens=[tokenizer.decode([token]) if token != tokenizer.eod else "<end>" for token in ids],
        weights={site: {at: each[0].cpu().numpy() for at, each in row.items()} for site, row in rows.items()},
        rms={layer: value for (name, layer), value in roots(squares).items() if name == "output_rms"},
    )


def _heads_mean(weights: Tensor) -> Tensor:
    """`(1, T)` or `(1, T, H)` to `(T,)`."""
    return weights.flatten(2).mean(-1)[0] if weights.dim() > 2 else weights[0]


def count_parameters(model: Transformer) -> dict[str, int]:
    """How many parameters each part has; a tied head counts with the embedding."""
    sublayers: list[Any] = list(model.sublayers.values())
    parts: dict[str, list[nn.Module]] = {
        "embedding": [model.embedding],
        "attention": [sublayer.mixer for sublayer in sublayers[0::2]],
        "MLP": [sublayer.mixer for sublayer in sublayers[1::2]],
        "norms": [model.norm, *(sublayer.norm for sublayer in sublayers)],
        "residual": [model.residual],
        "head": [] if model.config.tie_embeddings else [model.head],
    }
    return {
        name: sum(parameter.numel() for module in modules for parameter in module.parameters())
        for name, modules in parts.items()
    }


def most_read(row: Mapping[int, float], count: int = 3) -> list[tuple[int, float]]:
    """The sources with the largest weights, largest first."""
    return sorted(row.items(), key=lambda item: (-item[1], item[0]))[:count]


def effective_sources(row: Mapping[int, float]) -> float:
    """How many sources a site reads, as the exponential of the entropy of its weights; n for n equal ones."""
    return math.exp(-sum(weight * math.log(weight) for weight in row.values() if weight > 0))
