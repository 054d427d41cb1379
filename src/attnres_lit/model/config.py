"""The shape of the network. What connects its sublayers through depth is chosen apart, as a residual strategy."""

from dataclasses import dataclass
from typing import Any

from attnres_lit.model.rope_scaling import check_rope_scaling


@dataclass
class TransformerConfig:
    """A Llama-style decoder.

    Args:
        vocab_size: entries of the embedding and the head; set by the tokenizer on the command line.
        dim: model width D.
        num_layers: layers, each one attention and one MLP sublayer.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads; null means num_heads.
        head_dim: width of a head, even, for the rotary embedding; null means D / num_heads.
        hidden_dim: width inside the MLPs, or a list with that of every layer; null means 8/3 D rounded up to a
            multiple of 8.
        max_seq_len: longest sequence in tokens.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretches the rotary frequencies, see `rope_scaling.py`; null leaves them.
        norm_eps: of the sublayers' and the final norm, for inputs the size of PreNorm's; where the residual says that
            it reads less at the start, the norm takes less of it. Also of the norms on queries and keys.
        qkv_bias: biases on the projections to queries, keys and values.
        qk_norm: RMSNorm with a learned gain on every head's queries and keys, before they are rotated.
        tie_embeddings: the head uses the embedding matrix.

    Raises:
        ValueError: sizes that are not positive or do not divide; another number of widths than layers; a
            `rope_scaling` that is unknown or incomplete.
    """

    vocab_size: int
    dim: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | list[int] | None = None
    max_seq_len: int = 1024
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-12
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if len(self.mlp_dims) != self.num_layers:
            raise ValueError(
                f"hidden_dim={self.hidden_dim} has {len(self.mlp_dims)} widths: give one for each of "
                f"num_layers={self.num_layers}, or a single number for all"
            )
        if not all(type(each) is int and each >= 1 for each in self.mlp_dims):
            raise ValueError(f"hidden_dim={self.hidden_dim} must be a whole number of at least 1, or a list of them")
        if self.rope_theta <= 0 or self.norm_eps < 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0, and norm_eps={self.norm_eps} at least 0")
        if self.head_dim is None and (self.dim % self.num_heads or self.dim // self.num_heads % 2):
            raise ValueError(f"dim={self.dim} must be an even multiple of num_heads={self.num_heads}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)

    @property
    def num_sites(self) -> int:
        """Sublayers of the model, two a layer."""
        return 2 * self.num_layers

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def mlp_dims(self) -> list[int]:
        """Width inside the MLP of every layer."""
        if isinstance(self.hidden_dim, list):
            return self.hidden_dim
        return [-(-self.dim // 3) * 8 if self.hidden_dim is None else self.hidden_dim] * self.num_layers
