"""What Hyper-Connections and mHC share: n residual streams on an axis of their own, mixed at every write.

    X' = H_res X + H_post^T f(h)        X (n, D), H_res (n, n), H_post (n)

Coefficients and mixing are computed in at least fp32 and never under autocast.
"""

import torch
from torch import Tensor

from attnres_lit.residual.base import Note, Residual, Sources


class Streams(Residual):
    """n streams, `(B, T, n, D)`; a subclass reads them, and notes for `write` H_post and, if it mixes, H_res.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        num_streams: n.

    Raises:
        ValueError: fewer than 2 streams.
    """

    def __init__(self, num_sites: int, dim: int, num_streams: int) -> None:
        super().__init__(num_sites, dim)
        if num_streams < 2:
            raise ValueError(f"{type(self).__name__} needs num_streams >= 2, got {num_streams}")
        self.num_streams = num_streams

    def open(self, embedding: Tensor) -> Sources:
        """Every stream starts as the embedding."""
        return Sources((), embedding.unsqueeze(-2).expand(*embedding.shape[:-1], self.num_streams, self.dim))

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """H_res X + H_post^T output, where `H_res[k, j]` is what stream k takes of stream j."""
        post, *mixing = note
        streams = sources.stream
        with torch.autocast(output.device.type, enabled=False):
            mixed = streams.to(post.dtype)
            if mixing:
                mixed = mixing[0] @ mixed  # (..., n, n) @ (..., n, D)
            mixed = torch.addcmul(mixed, post.unsqueeze(-1), output.to(post.dtype).unsqueeze(-2))
        return Sources((), mixed.to(streams.dtype))


def gated_sum(gates: Tensor, streams: Tensor) -> Tensor:
    """`(..., n)` and `(..., n, D)` to `(..., D)`."""
    with torch.autocast(streams.device.type, enabled=False):
        return (gates.unsqueeze(-2) @ streams.to(gates.dtype)).squeeze(-2).to(streams.dtype)
