"""What Full and Block AttnRes share: the learned queries, and the read that is one depth attention (arXiv 2603.15031).

    h_s = depth_attention(sources at s, query_s, key_gain_s)

Every site has its own pseudo-query and key gain, and so has the exit. Site 0 reads the embedding alone, so it owns
none. Queries start at zero: a plain mean of the sources, which a sublayer's input norm makes equal to PreNorm.
"""

import torch
from torch import Tensor, nn

from attnres_lit.ops import depth_attention
from attnres_lit.residual.base import Note, Residual, Sources


class AttnRes(Residual):
    """Depth attention over all sources; a subclass says in `open` and `write` what becomes a source.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads H; each attends over depth with its own slice of D.
        eps: of the norm on keys.

    Raises:
        ValueError: `num_heads` does not divide `dim`.
    """

    def __init__(self, num_sites: int, dim: int, key_norm: bool = True, num_heads: int = 1, eps: float = 1e-6) -> None:
        super().__init__(num_sites, dim)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}")
        self.num_heads = num_heads
        self.eps = eps if key_norm else None
        self.query = nn.ParameterDict({str(site): torch.empty(dim) for site in range(1, num_sites)})
        self.exit_query = nn.Parameter(torch.empty(dim))
        if key_norm:
            self.key_gain = nn.ParameterDict({str(site): torch.empty(dim) for site in range(1, num_sites)})
            self.exit_key_gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Queries zero, gains one."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 1.0 if "key_gain" in name else 0.0)

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """Depth attention over every source."""
        values = self.values(sources)
        if site == 0:
            return values[0], ()
        return depth_attention(values, *self._query(site), eps=self.eps), ()

    def exit(self, sources: Sources) -> Tensor:
        """Depth attention over every source, with the exit's own query."""
        return depth_attention(self.values(sources), *self._query(self.num_sites), eps=self.eps)

    def weights(self, sources: Sources, site: int) -> Tensor | None:
        """The softmax weights of `site`; ones where there is a single source."""
        values = self.values(sources)
        if site == 0:
            return values[0].new_ones(1, *values[0].shape[:-1])
        return depth_attention(values, *self._query(site), eps=self.eps, return_weights=True)[1]

    @staticmethod
    def values(sources: Sources) -> tuple[Tensor, ...]:
        """What a site attends to: the finished sources, and the partial last."""
        return sources.done if sources.partial is None else (*sources.done, sources.partial)

    def _query(self, site: int) -> tuple[Tensor, Tensor | None]:
        """Query and key gain of a site; `num_sites` stands for the exit."""
        last = site == self.num_sites
        query = self.exit_query if last else self.query[str(site)]
        if self.num_heads > 1:
            query = query.view(self.num_heads, -1)
        if self.eps is None:
            return query, None
        return query, self.exit_key_gain if last else self.key_gain[str(site)]
