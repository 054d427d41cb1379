"""The network, with the residual connection left open."""

from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.transformer import ResidualFactory, Transformer

__all__ = ["ResidualFactory", "Transformer", "TransformerConfig"]
