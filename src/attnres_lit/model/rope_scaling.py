"""How pretrained models stretch their rotary frequencies to contexts longer than they were first trained on.

The options have the names and meanings that they have in a Hugging Face config.json, under `rope_parameters` or, in
older ones, `rope_scaling`:

| rope_type | options                                                                                             |
|-----------|-----------------------------------------------------------------------------------------------------|
| linear    | factor                                                                                              |
| llama3    | factor, low_freq_factor, high_freq_factor, original_max_position_embeddings                         |
| yarn      | factor, original_max_position_embeddings; attention_factor, beta_fast, beta_slow, mscale,           |
|           | mscale_all_dim, truncate                                                                            |

linear divides every frequency (arXiv 2306.15595); llama3 the low ones, with a smooth passage (arXiv 2407.21783); yarn
those that turn less than `beta_slow` times in the original context, with a ramp up to `beta_fast` times, and it scales
the tables by `attention_factor` (arXiv 2309.00071).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NEEDED = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
OPTIONAL = {"yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}}


def check_rope_scaling(scaling: Mapping[str, Any]) -> None:
    """Refuse options that name no known scaling or do not belong to it. Raises ValueError."""
    kind = scaling.get("rope_type")
    if kind not in NEEDED:
        raise ValueError(f"rope_scaling.rope_type={kind} is not supported: choose one of {', '.join(NEEDED)}")
    given = set(scaling) - {"rope_type"}
    if missing := NEEDED[kind] - given:
        raise ValueError(f"rope_scaling of rope_type={kind} needs {', '.join(sorted(missing))}")
    if unknown := given - NEEDED[kind] - OPTIONAL.get(kind, set()):
        raise ValueError(f"rope_scaling of rope_type={kind} does not take {', '.join(sorted(unknown))}")
    for name in NEEDED[kind]:
        if not isinstance(scaling[name], int | float) or scaling[name] <= 0:
            raise ValueError(f"rope_scaling.{name}={scaling[name]} must be a number above 0")


def scale_frequencies(frequencies: Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Stretch the frequencies of rotary positions.

    Args:
        frequencies: `theta ** (-2 i / head_dim)`, `(head_dim / 2,)`, radians a token.
        theta: base of the frequencies.
        scaling: options that `check_rope_scaling` accepts.

    Returns:
        The frequencies, and the factor of both tables, cosines and sines.
    """
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, theta, scaling), _attention_factor(scaling)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling["factor"], frequencies, kept)


def _yarn(frequencies: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    half = len(frequencies)

    def channel_of(turns: float) -> float:
        """The channel, not rounded, that turns so often in the original context."""
        return half * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)

    first, last = channel_of(scaling.get("beta_fast") or 32), channel_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001  # as in the models' own code: a step where the two meet
    stretched = ((torch.arange(half, device=frequencies.device) - first) / width).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / scaling["factor"], stretched)


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(scaling["factor"], mscale) / _mscale(scaling["factor"], mscale_all_dim)
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
