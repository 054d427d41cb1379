"""Causal self-attention with grouped-query heads and rotary positions: the one place where tokens see each other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.kv_cache import Slots
from attnres_lit.model.norm import RMSNorm
from attnres_lit.model.rope_scaling import scale_frequencies


class Attention(nn.Module):
    """`(B, T, D)` to `(B, T, D)`."""

    def __init__(self, config: TransformerConfig, rotary: "Rotary") -> None:
        super().__init__()
        self.head_dim = config.head_width
        kv_heads = config.num_kv_heads or config.num_heads
        self.q_proj = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.rotary = rotary
        self.grouped = kv_heads != config.num_heads

    def forward(self, x: Tensor, slots: Slots | None = None) -> Tensor:
        """Attend to this and earlier tokens, those in `slots` included."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = slice(q.shape[-2]) if slots is None else slots.positions
        q, k = self.rotary(self.q_norm(q), at), self.rotary(self.k_norm(k), at)
        mask = None
        if slots is not None:
            (k, v), mask = slots.extend(k, v), slots.mask
        causal = mask is None and q.shape[-2] > 1  # a last token sees everything
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864): channel i turns with channel i + head_dim / 2.

    One module, shared by all attention sublayers of a model.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.shape = (config.max_seq_len, config.head_width)
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self.register_buffer("cos", torch.empty(self.shape), persistent=False)
        self.register_buffer("sin", torch.empty(self.shape), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables; also called after materialising from meta."""
        max_seq_len, head_dim = self.shape
        device = self.cos.device
        frequencies = self.theta ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)  # (head_dim / 2,)
        size = 1.0
        if self.scaling is not None:
            frequencies, size = scale_frequencies(frequencies, self.theta, self.scaling)
        angles = torch.outer(torch.arange(max_seq_len, device=device), frequencies).repeat(1, 2)
        self.cos.copy_(size * angles.cos())
        self.sin.copy_(size * angles.sin())

    def forward(self, x: Tensor, at: slice | Tensor) -> Tensor:
        """Rotate `(B, heads, T, head_dim)`, in at least fp32, by the positions `at`: a slice, or `(B, 1, T)`."""
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (x * self.cos[at] + turned * self.sin[at]).to(x.dtype)
