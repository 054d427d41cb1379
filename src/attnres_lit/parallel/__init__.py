"""How the network is spread over processes.

The strategies load on first use, so that the rest of this package does not cost Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnres_lit.parallel.pipeline import BlockCacheCallback, PipelineStrategy
    from attnres_lit.parallel.sharded import FullyShardedStrategy

_HOMES = {"BlockCacheCallback": "pipeline", "PipelineStrategy": "pipeline", "FullyShardedStrategy": "sharded"}

__all__ = ["BlockCacheCallback", "FullyShardedStrategy", "PipelineStrategy"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
