"""A sublayer: one attention or one MLP behind its own input norm. It knows nothing of depth."""

from torch import Tensor, nn

from attnres_lit.model.kv_cache import Slots


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

    def forward(self, x: Tensor, *slots: Slots) -> Tensor:
        """`mixer(norm(x))`; an attention may be given the tokens before those of `x`."""
        return self.mixer(self.norm(x), *slots).to(x.dtype)
