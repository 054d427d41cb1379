"""What a sweep's YAML says: the cells, each the settings of one run, and how long they train."""

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from attnres_lit.checks import nearest

SEED = "seed_everything"
LENGTHS = ("steps", "tokens", "tokens_per_parameter", "flops")
Settings = dict[str, Any]  # dotted options of `fit`, in the order they are given


@dataclass(frozen=True)
class Budget:
    """How long a cell trains: one of the first four, for every cell alike or by its size.

    Args:
        steps: optimizer steps.
        tokens: training tokens.
        tokens_per_parameter: training tokens for each parameter of the sublayers.
        flops: of training, forward and backward.
        warmup: share of the steps in which the learning rate rises.
        validations: how often it validates, at equal distances, the last time at the end.

    Raises:
        ValueError: not exactly one of the first four, or a value that is out of range.
    """

    steps: int | None = None
    tokens: float | None = None
    tokens_per_parameter: float | None = None
    flops: float | None = None
    warmup: float = 0.1
    validations: int = 10

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(given) != 1:
            raise ValueError(f"budget: give one of {', '.join(LENGTHS)}, not {', '.join(given) or 'none'}")
        for name, value in [*given.items(), ("validations", self.validations), ("warmup", self.warmup)]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"budget.{name} is {value!r}: it must be a number (write 1.0e+6, with dot and sign)")
            if name in ("steps", "validations") and not isinstance(value, int):
                raise ValueError(f"budget.{name} is {value}: it must be a whole number")
            if not (0 <= value < 1 if name == "warmup" else 0 < value < math.inf):
                raise ValueError(
                    f"budget.{name} is {value}: it must be {'in [0, 1)' if name == 'warmup' else 'above 0'}"
                )

    def num_steps(self, parameters: int, tokens_per_step: int, flops_per_token: float) -> int:
        """Optimizer steps of a model, rounded up to a multiple of the validations."""
        tokens = self.tokens
        if self.tokens_per_parameter is not None:
            tokens = self.tokens_per_parameter * parameters
        elif self.flops is not None:
            tokens = self.flops / flops_per_token
        steps = self.steps if tokens is None else tokens / tokens_per_step
        assert steps is not None
        return math.ceil(round(steps / self.validations, 6)) * self.validations


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its name, the options of `fit` that make it, and how long it trains."""

    name: str
    settings: Settings
    budget: Budget


@dataclass(frozen=True)
class Sweep:
    """A YAML file of a sweep, read: its configs and cells."""

    configs: list[str]
    cells: list[Cell]

    def arguments(self, cell: Cell) -> list[str]:
        """Of `fit`: the base configs, and the cell's settings."""
        configs = [word for path in self.configs for word in ("--config", path)]
        return configs + [f"--{key}={written(value)}" for key, value in cell.settings.items()]


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: of two axes or cells of one name, one would silently go."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep.

    `config` names a base config or a list of them; `set` are options of all cells; `axes` are what they differ in: each
    is a list of values of one option, or a mapping from labels to options, those of the `budget` included. The cells
    are the product of the axes, the first changing slowest; a name has the labels, that of the seed last. Paths of
    YAML files are relative to the sweep's own.

    Raises:
        ValueError: the file cannot be read, or says something else; an axis is empty; two cells have one name.
    """
    try:
        said = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the sweep {path} cannot be read: {' '.join(str(error).split())}") from None
    keys = ("config", "set", "axes", "budget")
    if not isinstance(said, dict):
        raise ValueError(f"{path} is no sweep: it must have the keys {', '.join(keys)}")
    for key in said:
        if key not in keys:
            raise ValueError(f"{path}: unknown key {key!r}; known are {', '.join(keys)}{nearest(str(key), list(keys))}")
    configs = said.get("config")
    configs = [configs] if isinstance(configs, str) else configs
    if not isinstance(configs, list) or not configs or not all(isinstance(each, str) for each in configs):
        raise ValueError(f"{path}: `config` must name the config that all cells start from")
    for name in configs:
        if not (path.parent / name).is_file():
            raise ValueError(f"{path}: config: there is no {path.parent / name}")
    shared = _settings(said.get("set") or {}, path, "set")
    axes = said.get("axes")
    if not isinstance(axes, dict) or not axes:
        raise ValueError(f"{path}: `axes` must say in what the cells differ")
    sides = [_axis(name, values, path) for name, values in axes.items()]
    cells = []
    for chosen in itertools.product(*sides):
        settings = dict(shared)
        for _, options in chosen:
            settings |= options
        labels = sorted((label for label, _ in chosen), key=lambda label: label.startswith("seed="))  # the seed last
        own = {key: settings.pop(key) for key in list(settings) if key.startswith("budget.")}
        cells.append(Cell("-".join(labels), settings, _budget(said.get("budget"), own, path)))
    names = [cell.name for cell in cells]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: two cells are called {min(twice)}: give the values of an axis different labels")
    return Sweep([_below(path, each) for each in configs], cells)


def _budget(said: Any, own: Settings, path: Path) -> Budget:
    """The budget as it is written, with what a cell has of its own."""
    known = [field.name for field in fields(Budget)]
    own = {key.removeprefix("budget."): value for key, value in own.items()}
    if not isinstance(said, dict | None):
        raise ValueError(f"{path}: `budget` must say how long a cell trains, for example steps: 500")
    said = {key: value for key, value in (said or {}).items() if key not in LENGTHS or not own.keys() & set(LENGTHS)}
    for key in said | own:
        if key not in known:
            raise ValueError(f"{path}: unknown budget {key!r}; known are {', '.join(known)}{nearest(str(key), known)}")
    try:
        return Budget(**(said | own))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _axis(name: str, values: Any, path: Path) -> list[tuple[str, Settings]]:
    """The labels of an axis, and the settings of each."""
    if not values or not isinstance(values, list | dict):
        raise ValueError(f"{path}: axis {name!r} is empty: give it a list of values, or labels with options")
    if isinstance(values, list):
        short = "seed" if name == SEED else name.rpartition(".")[2]
        return [(_label(f"{short}={_plain(value)}"), _settings({name: value}, path, name)) for value in values]
    return [
        (_label(str(label)), _settings(options or {}, path, f"{name}.{label}")) for label, options in values.items()
    ]


def _plain(value: Any) -> str:
    """A value as a label shows it: a config by its name."""
    return Path(value).stem if isinstance(value, str) and value.endswith((".yaml", ".yml")) else written(value)


def _label(text: str) -> str:
    """Without what the name of a folder should not have."""
    return re.sub(r"[^\w=.,+-]", "_", text).strip("_.") or "_"


def _settings(options: Any, path: Path, where: str) -> Settings:
    """Options by dotted key; YAML files found beside the sweep."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{path}: {where} must be options with values, such as model.config.dim: 64")
    settings: Settings = {}
    for key, value in options.items():
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            if not (path.parent / value).is_file():
                raise ValueError(f"{path}: {where}: there is no {path.parent / value}")
            value = _below(path, value)
        settings[str(key)] = value
    return settings


def _below(path: Path, name: str) -> str:
    """A path that is written in a sweep, as it is reached from here."""
    return os.path.relpath(path.parent / name)


def written(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
