"""Manifold-constrained Hyper-Connections: n residual streams, mixed by a doubly stochastic matrix (arXiv 2512.24880).

    X' = H_res X + H_post^T f(H_pre X)        X (n, D)
    z = RMSNorm(vec X) projection        pre, post, res = split(scale * z + bias)
    H_pre = sigmoid(pre) (n)        H_post = 2 sigmoid(post) (n)        H_res = sinkhorn(res) (n, n)

Coefficients and mixing are computed in at least fp32 and never under autocast. H_res is applied as
X'[k] = sum_j H_res[k, j] X[j]; its rows sum to one exactly, its columns as far as Sinkhorn has converged. mHC-lite
(arXiv 2601.05732) takes a convex combination of the n! permutations instead, of which both sum to one exactly.
"""

from collections.abc import Iterable
from math import factorial
from typing import Literal

import torch
from torch import Tensor, nn

from attnres_lit.ops import permutation_mixture, sinkhorn
from attnres_lit.ops.eager import compute_dtype
from attnres_lit.residual.base import Note, Sources
from attnres_lit.residual.streams import Streams, gated_sum

NORM_EPS = 1e-20  # of the norm on the flattened streams (paper, Table 5)
GATE = 0.01  # initial scale of the input-dependent part (paper, Table 5)


class MHC(Streams):
    """n streams on their own axis, `(B, T, n, D)`.

    At site 0 all streams are equal, so reading and mixing them has nothing to learn there: site 0 owns the write part
    only. Permutations leave the mean of the streams as it is, so with exit="mean" the last site owns no H_res.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        num_streams: n.
        num_iters: Sinkhorn iterations.
        exit: "mean" of the streams, or "learned": a sigmoid gate per stream and token.
        init: "prenorm" starts as PreNorm, streams told apart by the read bias and mixed slowly (`res` is 0 on the
            diagonal and -4 beside it; 0 for the identity and -8 for the other permutations); "deepseek" draws the
            projections from N(0, 0.02) and sets every bias to zero.
        projection: "sinkhorn", or "permutations" for at most 4 streams (mHC-lite), which has no use for `num_iters`.

    Raises:
        ValueError: fewer than 2 streams, more than 4 of "permutations", fewer than 1 iteration, or an unknown `exit`,
            `init` or `projection`.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        num_streams: int = 4,
        num_iters: int = 20,
        exit: Literal["mean", "learned"] = "mean",
        init: Literal["prenorm", "deepseek"] = "prenorm",
        projection: Literal["sinkhorn", "permutations"] = "sinkhorn",
    ) -> None:
        super().__init__(num_sites, dim, num_streams)
        if num_iters < 1:
            raise ValueError(f"MHC needs num_iters >= 1, got {num_iters}")
        if projection not in ("sinkhorn", "permutations"):
            raise ValueError(f"projection is sinkhorn or permutations, got projection={projection}")
        permutes = projection == "permutations"
        if permutes and num_streams > 4:
            raise ValueError(f"projection=permutations takes at most 4 streams, num_streams={num_streams}")
        if exit not in ("mean", "learned") or init not in ("prenorm", "deepseek"):
            raise ValueError(f"exit is mean or learned, init is prenorm or deepseek; got exit={exit}, init={init}")
        n = num_streams
        self.num_iters = num_iters
        self.init = init
        self.mapping = projection  # its name is taken by the parameters
        self.starts_as_prenorm = init == "prenorm"
        # rows of a projection: pre (n), post (n), res (n * n, or n! permutations); at site 0 post alone
        self.parts = {str(site): [n, n, factorial(n) if permutes else n * n] for site in range(num_sites)}
        self.parts["0"] = [n]
        if permutes and exit == "mean":
            self.parts[str(num_sites - 1)] = [n, n]
        self.projection = nn.ParameterDict({site: torch.empty(sum(p), n * dim) for site, p in self.parts.items()})
        self.bias = nn.ParameterDict({site: torch.empty(sum(p)) for site, p in self.parts.items()})
        self.scale = nn.ParameterDict({site: torch.empty(len(p)) for site, p in self.parts.items()})
        self.learned_exit = exit == "learned"
        if self.learned_exit:
            self.exit_projection = nn.Parameter(torch.empty(n, n * dim))
            self.exit_bias = nn.Parameter(torch.empty(n))
            self.exit_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """See `init`."""
        for name, parameter in self.named_parameters():
            if "scale" in name:
                nn.init.constant_(parameter, GATE)
            elif "projection" in name and self.init == "deepseek":
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)
        if self.init == "deepseek":
            return
        for site in range(1, self.num_sites):
            with torch.no_grad():
                pre, _, *res = self.bias[str(site)].split(self.parts[str(site)])
                pre.copy_(_read_bias(site, self.num_streams))
                for logits in res:
                    self._stay(logits)

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """The projections."""
        return [parameter for name, parameter in self.named_parameters() if "projection" in name]

    def read_scale(self, site: int) -> float:
        """The sum of the read gates: at the start all streams are PreNorm's, but for what random projections add."""
        if site == self.num_sites:
            return self.num_streams / 2 if self.learned_exit else 1.0
        if site == 0:
            return 1.0
        if self.init == "deepseek":
            return self.num_streams / 2
        return float(_read_bias(site, self.num_streams).sigmoid().sum())

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """H_pre X; the note holds H_post and, where the site owns it, H_res."""
        streams, key = sources.stream, str(site)
        logits = _logits(streams, self.projection[key], self.bias[key], self.scale[key], self.parts[key])
        if site == 0:
            return streams[..., 0, :], (2 * logits[0].sigmoid(),)
        pre, post, *res = logits
        return gated_sum(pre.sigmoid(), streams), (2 * post.sigmoid(), *map(self._matrix, res))

    def exit(self, sources: Sources) -> Tensor:
        """The mean of the streams, or their learned gated sum."""
        streams = sources.stream
        if not self.learned_exit:
            return streams.mean(-2)
        n = self.num_streams
        (gate,) = _logits(streams, self.exit_projection, self.exit_bias, self.exit_scale, [n])
        return gated_sum(gate.sigmoid(), streams)

    def _matrix(self, logits: Tensor) -> Tensor:
        """H_res, `(..., n, n)`."""
        if self.mapping == "permutations":
            return permutation_mixture(logits)
        return sinkhorn(logits.unflatten(-1, (self.num_streams, -1)), self.num_iters)

    def _stay(self, logits: Tensor) -> None:
        """Set the logits of an H_res close to the identity."""
        if self.mapping == "permutations":
            logits.fill_(-8.0)[0] = 0.0
        else:
            logits.fill_(-4.0).view(self.num_streams, -1).fill_diagonal_(0.0)


def _read_bias(site: int, num_streams: int) -> Tensor:
    """Of "prenorm": every site prefers a stream of its own."""
    bias = torch.full((num_streams,), -1.0, device="cpu")
    bias[site % num_streams] = 1.0
    return bias


def _logits(streams: Tensor, projection: Tensor, bias: Tensor, scale: Tensor, parts: list[int]) -> tuple[Tensor, ...]:
    """Streams `(..., n, D)` to the logits of each part, `(..., part)`; the norm is applied after the product."""
    dtype = compute_dtype(streams)
    with torch.autocast(streams.device.type, enabled=False):
        flat = streams.to(dtype).flatten(-2)  # (..., n * D)
        rstd = (flat.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        products = (flat @ projection.to(dtype).T * rstd).split(parts, -1)
        return tuple(
            gate * product + shift
            for gate, product, shift in zip(scale.to(dtype), products, bias.to(dtype).split(parts), strict=True)
        )
