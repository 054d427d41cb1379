"""RMSNorm that stays fused in mixed precision."""

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * gain` (arXiv 1910.07467), in the dtype of `x`; the mean square is fp32 inside.

    The gain is cast to the dtype of `x`, as autocast does with the weights of a Linear: mixed dtypes would fall back to
    an unfused path.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
