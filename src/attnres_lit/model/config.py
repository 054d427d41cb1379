"""The shape of the network. What connects its sublayers through depth is chosen apart, as a residual strategy."""

from dataclasses import dataclass


@dataclass
class TransformerConfig:
    """A Llama-style decoder.

    Args:
        vocab_size: entries of the embedding and the head; set by the tokenizer on the command line.
        dim: model width D.
        num_layers: layers, each one attention and one MLP sublayer.
        num_heads: query heads; D / num_heads must be even, for the rotary embedding.
        num_kv_heads: key and value heads, a divisor of num_heads; null means num_heads.
        hidden_dim: width inside the MLP; null means 8/3 D rounded up to a multiple of 8.
        max_seq_len: longest sequence in tokens.
        rope_theta: base of the rotary frequencies.
        norm_eps: of the sublayers' and the final norm. Small, since with zero queries depth attention reads the mean of
            its sources, which may be far smaller than their sum.
        tie_embeddings: the head uses the embedding matrix.

    Raises:
        ValueError: sizes that are not positive or do not divide.
    """

    vocab_size: int
    dim: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    max_seq_len: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-12
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "hidden_dim",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.rope_theta <= 0 or self.norm_eps < 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0, and norm_eps={self.norm_eps} at least 0")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise ValueError(f"dim={self.dim} must be an even multiple of num_heads={self.num_heads}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")

    @property
    def num_sites(self) -> int:
        """Sublayers of the model, two a layer."""
        return 2 * self.num_layers

    @property
    def mlp_dim(self) -> int:
        """Width inside the MLP."""
        return self.hidden_dim or -(-self.dim // 3) * 8
