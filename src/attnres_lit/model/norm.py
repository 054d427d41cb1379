"""RMSNorm that stays fused in mixed precision."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * gain` (arXiv 1910.07467), in the dtype of `x`; the mean square is fp32 inside.

    The gain is cast to the dtype of `x`, as autocast does with the weights of a Linear: mixed dtypes would fall back to
    an unfused path. While a graph is captured, eps is a tensor and the formula is spelt out, for the compiler to fuse:
    sites differ in eps, and a number would be built into a graph for each of them.
    """

    floor: Tensor

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.register_buffer("floor", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain to one; also called after materialising from meta."""
        super().reset_parameters()
        if "floor" in self._buffers and self.eps is not None:  # the base class asks before there is one
            self.floor.fill_(self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        gain = self.weight.to(x.dtype)
        if not torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, gain, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.floor).rsqrt()).to(x.dtype) * gain
