"""Models of other packages at the sizes of ours, each beside the plain residual of the same package.

Only what pip installs, see peers.txt; depths, widths and heads are equal, details of the sublayers are theirs.
"""

from collections.abc import Iterator

from attn_res import AttnResMode, AttnResTransformer
from attn_res import TransformerConfig as AttnResConfig
from fla.ops.attnres import naive_attnres
from hyper_connections import mHC
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.residual import BlockAttnRes, FullAttnRes, PreNorm, Sources
from attnres_lit.residual.attnres import AttnRes
from attnres_lit.residual.base import Note


def peers(config: TransformerConfig) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of a case, its model, and the name of the case it is measured against."""
    plain = "attn-res plain"
    for name, mode in {plain: "NONE", "attn-res block": "BLOCK", "attn-res full": "FULL"}.items():
        yield name, attn_res(config, AttnResMode[mode]), plain
    plain = "x-transformers plain"
    variants: dict[str, dict[str, object]] = {
        plain: {},
        "x-transformers attn_aggregated_residuals": {"attn_aggregated_residuals": True},
        "x-transformers integrate_layers": {"integrate_layers": True},
        "x-transformers 4 residual streams": {"num_residual_streams": 4},
    }
    for name, options in variants.items():
        yield name, x_transformers(config, options), plain
    yield "hyper-connections mHC, our sublayers", HyperConnected(config), "prenorm"
    yield "fla naive block, our sublayers", Transformer(config, NaiveBlock), "prenorm"
    yield "fla naive full, our sublayers", Transformer(config, NaiveFull), "prenorm"


def attn_res(config: TransformerConfig, mode: AttnResMode) -> nn.Module:
    """The model of attn-res; its `n_layers` counts sublayers, its exit is a plain sum."""
    return AttnResTransformer(
        AttnResConfig(
            d_model=config.dim,
            n_layers=config.num_sites,
            n_heads=config.num_heads,
            n_kv_heads=config.num_heads,
            vocab_size=config.vocab_size,
            max_seq_len=config.max_seq_len,
            attn_res_mode=mode,
            n_blocks=8,
        )
    )


def x_transformers(config: TransformerConfig, options: dict[str, object]) -> nn.Module:
    """A Llama-like decoder of x-transformers."""
    decoder = Decoder(
        dim=config.dim,
        depth=config.num_layers,
        heads=config.num_heads,
        attn_dim_head=config.dim // config.num_heads,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_swish=True,
        ff_glu=True,
        ff_mult=8 / 3,
        ff_no_bias=True,
        attn_flash=True,
        **options,
    )
    return TransformerWrapper(
        num_tokens=config.vocab_size, max_seq_len=config.max_seq_len, use_abs_pos_emb=False, attn_layers=decoder
    )


class HyperConnected(nn.Module):
    """Our sublayers under the mHC of hyper-connections, four streams."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        plain = Transformer(config, PreNorm)
        connect, self.expand, self.reduce = mHC.get_init_and_expand_reduce_stream_functions(4)
        self.embedding, self.norm, self.head = plain.embedding, plain.norm, plain.head
        self.sites = nn.ModuleList(
            connect(dim=config.dim, branch=sublayer, layer_index=site)
            for site, sublayer in enumerate(plain.sublayers.values())
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `(B, T)` to logits."""
        streams = self.expand(self.embedding(tokens))
        for site in self.sites:
            streams = site(streams)
        return self.head(self.norm(self.reduce(streams)))


class Naive(AttnRes):
    """Reads by the reference of fla-core: stack, then einsum."""

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """One call of `naive_attnres`."""
        values = self.values(sources)
        return (values[0] if site == 0 else self._attend(values, site)), ()

    def exit(self, sources: Sources) -> Tensor:
        """The same with the query of the exit."""
        return self._attend(self.values(sources), self.num_sites)

    def _attend(self, values: tuple[Tensor, ...], site: int) -> Tensor:
        query, gain = self._query(site)
        return naive_attnres(query, list(values), gain, rms_eps=self.eps)


class NaiveBlock(Naive, BlockAttnRes):
    """Block AttnRes of 8 blocks with naive reads."""


class NaiveFull(Naive, FullAttnRes):
    """Full AttnRes with naive reads."""
