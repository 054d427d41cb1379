"""Full Attention Residuals: every sublayer output is a source (arXiv 2603.15031, section 3.1).

h_s = sum_i softmax_i(query_s . RMSNorm(v_i)) v_i        v_0 = embedding, v_i = f_{i-1}(h_{i-1})
"""

from torch import Tensor

from attnres_lit.ops import Mixing, Query
from attnres_lit.residual.attnres import AttnRes, TwoPhase
from attnres_lit.residual.base import Note, Sources


class FullAttnRes(AttnRes):
    """Attend over the embedding and all earlier sublayer outputs.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        window: keep the embedding and only this many newest outputs; None keeps all. Once the window slides, zero
            queries no longer equal PreNorm.
        query: "static", a learned query per site, or "input", a learned matrix times the newest source.
        mixing: "softmax"; "sigmoid", whose weights do not compete; "static", the softmax of learned numbers, without
            queries and keys.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads; each attends over depth with its own slice of D.
        two_phase: answer the queries of a run of sqrt(num_sites) sites against the sources before it in one pass
            (appendix B); "auto": where that measured faster. Needs window=None, static queries and the softmax.
        eps: of the norm on keys.

    Raises:
        ValueError: `num_heads` does not divide `dim`; an unknown `query` or `mixing`; a window below 1; options that
            exclude one another.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        window: int | None = None,
        query: Query = "static",
        mixing: Mixing = "softmax",
        key_norm: bool = True,
        num_heads: int = 1,
        two_phase: TwoPhase = "auto",
        eps: float = 1e-6,
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1, or null for all sources")
        if window is not None and two_phase is True:
            raise ValueError(f"two_phase=true needs every source to stay: window={window} must be null")
        kept = num_sites if window is None else window
        num_sources = [1 + min(site, kept) for site in range(num_sites + 1)]
        super().__init__(num_sites, dim, query, mixing, key_norm, num_heads, two_phase, eps, num_sources)
        self.window = kept
        self.starts_as_prenorm = self.window >= num_sites
        if window is None:
            starts = range(0, num_sites, round(num_sites**0.5))
            self._share_phase_one(starts, seen=[start + 1 for start in starts])  # the embedding and `start` outputs

    def open(self, embedding: Tensor) -> Sources:
        """The embedding is the first source."""
        return Sources((embedding,), None)

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """The output is a new source; what slides out of the window is dropped here, so that its memory is free."""
        slid = max(0, len(sources.done) - self.window)
        done, ahead = ((kept[0:1] + kept[1 + slid :]) for kept in (sources.done, note))
        return Sources((*done, output), None, ahead)
