"""Hyper-parameters as plain values: what a checkpoint stores to rebuild the module, and what a resumed run must match.

    {"config": {...}, "residual": {"class_path": ..., "init_args": {...}}, "optim": {...}, ...}

They are the same whether the module was built by the command line or in Python, and load with `weights_only=True`.
"""

import inspect
import sys
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

from attnres_lit.model import ResidualFactory
from attnres_lit.residual.base import Residual

# Lightning's mark of hyper-parameters from a command line: load_from_checkpoint builds classes from these plain values
INSTANTIATOR = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}


def describe(residual: ResidualFactory) -> dict[str, Any]:
    """A factory as `{class_path, init_args}`, with the defaults of the options that it leaves open.

    Args:
        residual: a strategy class, or a `functools.partial` (of a partial...) of one with its options as keywords.

    Raises:
        ValueError: any other callable, a class that cannot be imported by name, or an option that is not a plain value.
    """
    strategy = strategy_of(residual)
    path = strategy and class_path(strategy)
    if strategy is None or path is None:
        raise ValueError(
            f"the residual {residual!r} cannot be stored in a checkpoint: use a strategy class that can be imported, "
            "or a functools.partial of one with its options as keywords"
        )
    options = {**defaults(strategy), **(residual.keywords if isinstance(residual, partial) else {})}
    return {"class_path": path, "init_args": {key: plain(value, key) for key, value in options.items()}}


def strategy_of(residual: ResidualFactory) -> type[Residual] | None:
    """The strategy class behind a factory; a `functools.partial` merges with one that it wraps."""
    candidates: tuple[Any, ...] = (residual,)
    if isinstance(residual, partial):
        candidates = (residual.func, *residual.args)  # jsonargparse's partial has the class among its arguments
    return next((each for each in candidates if inspect.isclass(each) and issubclass(each, Residual)), None)


def defaults(strategy: type[Residual]) -> dict[str, Any]:
    """The options of a strategy that have a default."""
    parameters = inspect.signature(strategy).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def class_path(cls: type) -> str | None:
    """The shortest dotted path of a class, which survives its file being moved; None if it has none, being local."""
    parts = cls.__module__.split(".")
    packages = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((f"{p}.{cls.__name__}" for p in packages if getattr(sys.modules[p], cls.__name__, None) is cls), None)


def plain(value: Any, name: str) -> Any:
    """A value made of dicts, lists, numbers, strings and None.

    Raises:
        ValueError: it holds anything else.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, name) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name}={value!r} cannot be stored in a checkpoint: use numbers, strings, lists or dicts")
