"""Manifold-constrained Hyper-Connections: n residual streams, mixed by a doubly stochastic matrix (arXiv 2512.24880).

    X' = H_res X + H_post^T f(H_pre X)        X (n, D)
    z = RMSNorm(vec X) projection        pre, post, res = split(scale * z + bias)
    H_pre = sigmoid(pre) (n)        H_post = 2 sigmoid(post) (n)        H_res = sinkhorn(res) (n, n)

Coefficients and mixing are computed in at least fp32 and never under autocast. H_res is applied as
X'[k] = sum_j H_res[k, j] X[j]; its rows sum to one exactly, its columns as far as Sinkhorn has converged.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from attnres_lit.ops import sinkhorn
from attnres_lit.ops.depth_attention import compute_dtype
from attnres_lit.residual.base import Note, Residual, Sources

NORM_EPS = 1e-20  # of the norm on the flattened streams (paper, Table 5)
GATE = 0.01  # initial scale of the input-dependent part (paper, Table 5)


class MHC(Residual):
    """n streams on their own axis, `(B, T, n, D)`.

    At site 0 all streams are equal, so reading and mixing them has nothing to learn there: site 0 owns the write part
    only.

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        num_streams: n.
        num_iters: Sinkhorn iterations.
        exit: "mean" of the streams, or "learned": a sigmoid gate per stream and token.
        init: "prenorm" starts as PreNorm, streams told apart by the read bias and mixed slowly (0 on the diagonal of
            `res`, -4 beside it); "deepseek" draws the projections from N(0, 0.02) and sets every bias to zero.

    Raises:
        ValueError: fewer than 2 streams, fewer than 1 iteration, or an unknown `exit` or `init`.
    """

    def __init__(
        self,
        num_sites: int,
        dim: int,
        num_streams: int = 4,
        num_iters: int = 20,
        exit: Literal["mean", "learned"] = "mean",
        init: Literal["prenorm", "deepseek"] = "prenorm",
    ) -> None:
        super().__init__(num_sites, dim)
        if num_streams < 2 or num_iters < 1:
            raise ValueError(f"MHC needs num_streams >= 2 and num_iters >= 1, got {num_streams} and {num_iters}")
        if exit not in ("mean", "learned") or init not in ("prenorm", "deepseek"):
            raise ValueError(f"exit is mean or learned, init is prenorm or deepseek; got exit={exit}, init={init}")
        self.num_streams = n = num_streams
        self.num_iters = num_iters
        self.init = init
        self.starts_as_prenorm = init == "prenorm"
        # rows of a projection: pre (n), post (n), res (n * n); at site 0 post alone
        self.parts = {str(site): [n, n, n * n] if site else [n] for site in range(num_sites)}
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
        n = self.num_streams
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
                pre, _, res = self.bias[str(site)].split(self.parts[str(site)])
                pre.copy_(_read_bias(site, n))
                res.fill_(-4.0).view(n, n).fill_diagonal_(0.0)

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

    def open(self, embedding: Tensor) -> Sources:
        """Every stream starts as the embedding."""
        return Sources((), embedding.unsqueeze(-2).expand(*embedding.shape[:-1], self.num_streams, self.dim))

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """H_pre X; the note holds H_post and, but for site 0, H_res."""
        streams, key = sources.stream, str(site)
        logits = _logits(streams, self.projection[key], self.bias[key], self.scale[key], self.parts[key])
        if site == 0:
            return streams[..., 0, :], (2 * logits[0].sigmoid(),)
        pre, post, res = logits
        mixing = sinkhorn(res.unflatten(-1, (self.num_streams, -1)), self.num_iters)
        return _gated_sum(pre.sigmoid(), streams), (2 * post.sigmoid(), mixing)

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """H_res X + H_post^T output."""
        post, *mixing = note
        streams = sources.stream
        with torch.autocast(output.device.type, enabled=False):
            mixed = streams.to(post.dtype)
            if mixing:
                mixed = mixing[0] @ mixed  # (..., n, n) @ (..., n, D)
            mixed = torch.addcmul(mixed, post.unsqueeze(-1), output.to(post.dtype).unsqueeze(-2))
        return Sources((), mixed.to(streams.dtype))

    def exit(self, sources: Sources) -> Tensor:
        """The mean of the streams, or their learned gated sum."""
        streams = sources.stream
        if not self.learned_exit:
            return streams.mean(-2)
        n = self.num_streams
        (gate,) = _logits(streams, self.exit_projection, self.exit_bias, self.exit_scale, [n])
        return _gated_sum(gate.sigmoid(), streams)


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


def _gated_sum(gates: Tensor, streams: Tensor) -> Tensor:
    """`(..., n)` and `(..., n, D)` to `(..., D)`."""
    with torch.autocast(streams.device.type, enabled=False):
        return (gates.unsqueeze(-2) @ streams.to(gates.dtype)).squeeze(-2).to(streams.dtype)
