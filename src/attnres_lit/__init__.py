"""Language models whose residual connection is the swappable part.

The public names load on first use, so that `import attnres_lit.ops` costs torch alone.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnres_lit.cli import main
    from attnres_lit.data.datamodule import TokenDataModule
    from attnres_lit.model import Transformer, TransformerConfig
    from attnres_lit.residual import (
        MHC,
        BlockAttnRes,
        DenseFormer,
        FullAttnRes,
        HyperConnections,
        PreNorm,
        Residual,
        Sources,
    )
    from attnres_lit.training.module import LanguageModel

__version__ = version("attnres_lit")

_HOMES = {
    "Transformer": "model",
    "TransformerConfig": "model",
    "Residual": "residual",
    "Sources": "residual",
    "PreNorm": "residual",
    "DenseFormer": "residual",
    "MHC": "residual",
    "FullAttnRes": "residual",
    "HyperConnections": "residual",
    "BlockAttnRes": "residual",
    "LanguageModel": "training.module",
    "TokenDataModule": "data.datamodule",
    "main": "cli",
}

__all__ = [
    "MHC",
    "BlockAttnRes",
    "DenseFormer",
    "FullAttnRes",
    "HyperConnections",
    "LanguageModel",
    "PreNorm",
    "Residual",
    "Sources",
    "TokenDataModule",
    "Transformer",
    "TransformerConfig",
    "main",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
