"""The SwiGLU MLP (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """`(B, T, D)` to `(B, T, D)`, through `hidden_dim` channels."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`down(silu(gate(x)) * up(x))`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
