"""Full Attention Residuals: every sublayer output is a source (arXiv 2603.15031, section 3.1).

h_s = sum_i softmax_i(query_s . RMSNorm(v_i)) v_i        v_0 = embedding, v_i = f_{i-1}(h_{i-1})
"""

from torch import Tensor

from attnres_lit.residual.attnres import AttnRes
from attnres_lit.residual.base import Note, Sources


class FullAttnRes(AttnRes):
    """Attend over the embedding and all earlier sublayer outputs.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        window: keep the embedding and only this many newest outputs; None keeps all. Once the window slides, zero
            queries no longer equal PreNorm.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads; each attends over depth with its own slice of D.
        eps: of the norm on keys.

    Raises:
        ValueError: `num_heads` does not divide `dim`; a window below 1.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        window: int | None = None,
        key_norm: bool = True,
        num_heads: int = 1,
        eps: float = 1e-6,
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1, or null for all sources")
        super().__init__(num_sites, dim, key_norm, num_heads, eps)
        self.window = num_sites if window is None else window
        self.starts_as_prenorm = self.window >= num_sites

    def open(self, embedding: Tensor) -> Sources:
        """The embedding is the first source."""
        return Sources((embedding,), None)

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """The output is a new source; what slides out of the window is dropped here, so that its memory is free."""
        embedding, *outputs = (*sources.done, output)
        return Sources((embedding, *outputs[-self.window :]), None)
