"""A sublayer: one attention or one MLP behind its own input norm. It knows nothing of depth."""

from torch import Tensor, nn


class Sublayer(nn.Module):
    """`(B, T, D)` to `(B, T, D)` of the same dtype, under autocast too.

    Args:
        norm: the input norm.
        mixer: the attention or the MLP.
    """

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """`mixer(norm(x))`."""
        return self.mixer(self.norm(x)).to(x.dtype)
