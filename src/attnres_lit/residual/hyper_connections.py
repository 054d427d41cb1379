"""Hyper-Connections: n residual streams, mixed by a free matrix (arXiv 2409.19606, algorithm 2 and appendix J).

    h = sum_i A[i, 0] X_i        X'_j = sum_i A[i, j] X_i + beta_j f(h)        A (n, n + 1), columns 0, 1..n; beta (n)
    [A | beta] = static                                                        static connections
    [A | beta] = static + scale * tanh(LayerNorm(X) projection)                dynamic ones, per token and stream

Unlike mHC's, the matrix is not doubly stochastic: the product of many can explode. The exit is the sum of the streams.
The paper also starts the output projections of sublayers sqrt(n) times larger; here the sublayers start the same
under every strategy.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_lit.ops.eager import compute_dtype
from attnres_lit.residual.base import Note, Sources
from attnres_lit.residual.streams import Streams, gated_sum

NORM_EPS = 1e-5
GATE = 0.01  # initial scale of the input-dependent part


class HyperConnections(Streams):
    """Starts as PreNorm: site s reads stream s mod n, streams stay apart, and every stream takes the whole output.

    At site 0 all streams are equal, and the sublayer's norm removes what a read could scale: site 0 owns no column 0.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        num_streams: n; activations of the residual grow n-fold.
        dynamic: let the coefficients depend on the streams.

    Raises:
        ValueError: fewer than 2 streams.
    """

    starts_as_prenorm = True

    def __init__(self, num_sites: int, dim: int, num_streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(num_sites, dim, num_streams)
        n = num_streams
        self.dynamic = dynamic
        self.parts = {str(site): [1, n, 1] if site else [n, 1] for site in range(num_sites)}  # read, mix, write
        self.static = nn.ParameterDict({site: torch.empty(n, sum(p)) for site, p in self.parts.items()})
        if dynamic:
            self.projection = nn.ParameterDict({site: torch.empty(dim, sum(p)) for site, p in self.parts.items()})
            self.scale = nn.ParameterDict({site: torch.empty(2) for site in self.parts})  # of A, of beta
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A = [e_(s mod n) | identity], beta = 1; projections zero, scales 0.01."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, GATE if name.startswith("scale") else 0.0)
        for site, static in self.static.items():
            *read, mix, write = static.split(self.parts[site], -1)
            mix.fill_diagonal_(1.0)
            write.fill_(1.0)
            for column in read:
                column[int(site) % self.num_streams] = 1.0

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """The projections."""
        return [parameter for name, parameter in self.named_parameters() if name.startswith("projection")]

    def read_scale(self, site: int) -> float:
        """The exit is the sum of n equal streams."""
        return float(self.num_streams) if site == self.num_sites else 1.0

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """The streams under column 0; the note holds beta and the other columns, transposed."""
        streams, key = sources.stream, str(site)
        *read, mix, write = self._coefficients(streams, key).split(self.parts[key], -1)  # (..., n, 1 | n | 1)
        h = gated_sum(read[0].squeeze(-1), streams) if read else streams[..., 0, :]
        return h, (write.squeeze(-1), mix.mT)

    def exit(self, sources: Sources) -> Tensor:
        """The sum of the streams."""
        return sources.stream.sum(-2).to(sources.stream.dtype)  # autocast would widen it

    def _coefficients(self, streams: Tensor, site: str) -> Tensor:
        """`[A | beta]` of a site, `(..., n, n + 2)`, in at least fp32."""
        dtype = compute_dtype(streams)
        static = self.static[site].to(dtype)
        if not self.dynamic:
            return static.expand(*streams.shape[:-1], -1)
        with torch.autocast(streams.device.type, enabled=False):
            normed = F.layer_norm(streams.to(dtype), (self.dim,), eps=NORM_EPS)
            moves = (normed @ self.projection[site].to(dtype)).tanh()
            of_a, of_beta = self.scale[site].to(dtype).unbind()
            return static + torch.cat((of_a * moves[..., :-1], of_beta * moves[..., -1:]), -1)
