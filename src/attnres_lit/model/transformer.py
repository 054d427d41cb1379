"""The network: tokens -> embed -> open -> [ read -> sublayer -> write ] x sites -> exit -> norm -> head."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from attnres_lit.model.attention import Attention, Rotary
from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.init import draw_seed, initialize
from attnres_lit.model.kv_cache import NO_PAST, Past
from attnres_lit.model.mlp import MLP
from attnres_lit.model.norm import RMSNorm
from attnres_lit.model.recompute import Again, Recompute
from attnres_lit.model.sublayer import Sublayer
from attnres_lit.ops import Backend, check_backend
from attnres_lit.residual.base import Residual, Sources

ResidualFactory = Callable[[int, int], Residual]


class Transformer(nn.Module):
    """A Llama-style decoder around any residual strategy.

    Initial values are drawn from torch's global generator. Built under `torch.device("meta")`, the model has none until
    `init.materialize` gives it, or what a process keeps of it, the same ones.

    Args:
        config: sizes.
        residual: called with `(num_sites, dim)`; a strategy class, or a `functools.partial` of one with its options.
        fp32_residual: keep sources and partial in fp32 under autocast, instead of the dtype the sublayers compute in.
        checkpoint_activations: what backward computes again instead of keeping it: "read" the input of every sublayer,
            true everything inside a layer but the Sources it starts from.
        depth_backend: what runs depth attention, see `ops/backends.py`.

    Raises:
        ValueError: an unknown `checkpoint_activations`; a `depth_backend` that is unknown or not installed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        residual: ResidualFactory,
        fp32_residual: bool = False,
        checkpoint_activations: Again = False,
        depth_backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_backend(depth_backend)
        self.seed = draw_seed()  # of all initial values, see `init.py`
        self.config = config
        self.fp32_residual = fp32_residual
        self.recompute = Recompute(checkpoint_activations)

        # small, and any class of a user's: it has values even where the rest of the model has none yet
        on_meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if on_meta else nullcontext():
            depth = residual(config.num_sites, config.dim)

        def norm(site: int) -> RMSNorm:
            # a read that is s times PreNorm's at the start: s x / sqrt(mean(s x)^2 + eps s^2) is what PreNorm computes
            return RMSNorm(config.dim, eps=config.norm_eps * depth.read_scale(site) ** 2)

        def mixer(site: int) -> nn.Module:
            return MLP(config.dim, config.mlp_dims[site // 2]) if site % 2 else Attention(config, rotary)

        rotary = Rotary(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.sublayers = nn.ModuleDict(
            {str(site): Sublayer(norm(site), mixer(site)) for site in range(config.num_sites)}
        )
        self.norm = norm(config.num_sites)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.residual = depth
        self.residual.depth_backend = depth_backend
        self.residual.recomputed = bool(checkpoint_activations)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        initialize(self)

    def forward(self, tokens: Tensor, past: Past = NO_PAST) -> Tensor:
        """Tokens `(B, T)` int64 to logits `(B, T, V)`. `past` has the tokens before them, see `kv_cache.py`."""
        return self.head(self.features(tokens, past))

    def features(self, tokens: Tensor, past: Past = NO_PAST) -> Tensor:
        """What the head reads, `(B, T, D)`."""
        sources = self.residual.open(self.embed(tokens))
        sources = self.layers(sources, past)
        return self.norm(self.residual.exit(sources))

    def layers(self, sources: Sources, past: Past = NO_PAST) -> Sources:
        """All sublayers that live here, layer by layer."""
        run = partial(self.run, past=past)
        for _, layer in groupby(map(int, self.sublayers), lambda site: site // 2):
            sources = self.recompute.layer(run, sources, *layer)
        return sources

    def run(self, sources: Sources, *sites: int, past: Past = NO_PAST) -> Sources:
        """Read, sublayer, write at each of the sites."""
        for site in sites:
            h, note = self.residual.read(sources, site)
            with self.recompute.read(h, lambda sources=sources, site=site: self.residual.read(sources, site)[0]):
                output = self.sublayers[str(site)](h, *past.get(site, ()))
            sources = self.residual.write(sources, output, site, note)
        return sources

    def compile_sublayers(self) -> None:
        """In place, so that names stay: one graph per kind and width, whatever the depth and the residual."""
        for sublayer in self.sublayers.values():
            sublayer.compile()

    def embed(self, tokens: Tensor) -> Tensor:
        """`(B, T)` to `(B, T, D)`, in the one dtype that all sources then have.

        Raises:
            ValueError: more tokens than `max_seq_len`.
        """
        if tokens.shape[-1] > self.config.max_seq_len:
            raise ValueError(f"{tokens.shape[-1]} tokens exceed max_seq_len={self.config.max_seq_len}")
        return self.embedding(tokens).to(self.source_dtype(tokens.device))

    def source_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of all sources: that of the parameters, or what autocast computes in."""
        if self.fp32_residual or not torch.is_autocast_enabled(device.type):
            return next(self.parameters()).dtype
        return torch.get_autocast_dtype(device.type)
