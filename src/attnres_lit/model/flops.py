"""Floating-point operations of the forward pass, by part; a multiply and an add count as two.

Matrix products alone: norms, rotations, activations and the residual's own reads are left out, as is usual. The
backward pass costs twice the forward.
"""

from attnres_lit.model.config import TransformerConfig


def site_flops(config: TransformerConfig, tokens: int) -> list[float]:
    """FLOPs per token of every sublayer, in sequences of `tokens`; causal attention sees half of them on average."""
    q_dim = config.head_width * config.num_heads
    kv_dim = config.head_width * (config.num_kv_heads or config.num_heads)
    projections = 2 * config.dim * (2 * q_dim + 2 * kv_dim)
    scores = 2 * q_dim * (tokens + 1)  # q.k and weights.v, (tokens + 1) / 2 keys each
    attention, mlp = float(projections + scores), 2.0 * 3 * config.dim  # the MLP's for each channel inside
    return [cost for width in config.mlp_dims for cost in (attention, mlp * width)]


def head_flops(config: TransformerConfig) -> float:
    """FLOPs per token of the head; the embedding is a lookup and costs none."""
    return 2.0 * config.dim * config.vocab_size
