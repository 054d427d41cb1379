"""The residual strategies: one file each, all behind the seam in `base.py`."""

from importlib import import_module
from pkgutil import iter_modules

from attnres_lit.residual.base import Residual, Sources
from attnres_lit.residual.block_attnres import BlockAttnRes
from attnres_lit.residual.denseformer import DenseFormer
from attnres_lit.residual.full_attnres import FullAttnRes
from attnres_lit.residual.hyper_connections import HyperConnections
from attnres_lit.residual.mhc import MHC
from attnres_lit.residual.prenorm import PreNorm

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)  # a new file is known to the command line by its class name, no list to edit

__all__ = ["MHC", "BlockAttnRes", "DenseFormer", "FullAttnRes", "HyperConnections", "PreNorm", "Residual", "Sources"]
