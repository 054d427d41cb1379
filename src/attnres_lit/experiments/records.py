"""Runs as records: what a folder of logs says of the settings of its runs, what they cost, and how they went."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from attnres_lit.experiments.logs import Curves, read_logs, run_folders
from attnres_lit.inference.load import strategy
from attnres_lit.model import ResidualFactory, Transformer, TransformerConfig
from attnres_lit.parallel.cost_model import flops, parameters
from attnres_lit.training.hparams import defaults

SEED = re.compile(r"-seed=(\d+)$")
NO_SETTING = ("root", "dir", "num_workers", "seed")  # of the data: they are about this machine, or vary with the seed


@dataclass(frozen=True)
class Costs:
    """Of a model: parameters, those of its sublayers alone, and FLOPs of training per token."""

    parameters: int
    sublayers: int
    flops_per_token: float


@dataclass(frozen=True)
class Weights:
    """Mean depth-attention weights, as `depth_weights.npz` of a run holds them.

    Args:
        table: `(sites + 1, sources)`, NaN where a site does not read a source; the last row is the exit.
        sites: `(sites + 1,)`; the exit has the number of sites.
        step: optimizer steps behind them.
    """

    table: np.ndarray
    sites: np.ndarray
    step: int

    @property
    def entropy(self) -> np.ndarray:
        """-sum w ln w / ln n of every site, for n sources: 1 if all are read alike; NaN where there is only one."""
        shares = self.table / np.nansum(self.table, axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            nats = -np.nansum(np.where(shares > 0, shares * np.log(shares), 0.0), axis=1)
            return nats / np.log(np.isfinite(self.table).sum(axis=1))


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: of its folder.
        folder: where it lives.
        config: its `config.yaml`, as plain values; empty if there is none.
        curves: its logs.
        costs: of its model; None where they cannot be told.
        weights: what its sites read; None if the run did not say.
        residual: class of the strategy; "" if unknown.
        options: of the strategy, defaults included.
        variant: the name of all runs that differ from this one in the seed alone.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    curves: Curves
    costs: Costs | None
    weights: Weights | None
    residual: str
    options: Mapping[str, Any]
    variant: str = ""

    @property
    def seed(self) -> int:
        """Of the initial values and the order of the data; 0 if the run does not say."""
        said = self.config.get("seed_everything")
        found = SEED.search(self.name)
        return said if isinstance(said, int) and not isinstance(said, bool) else int(found[1]) if found else 0

    def of(self, *keys: str) -> Any:
        """A value of the config, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def steps(self) -> int:
        """Optimizer steps that its logs reach."""
        return max((int(curve.index[-1]) for curve in self.curves.values()), default=0)

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps that it was to train for; None if it does not say."""
        asked = self.of("trainer", "max_steps")
        return asked if isinstance(asked, int) and asked > 0 else None

    @property
    def tokens_per_step(self) -> int | None:
        """Of training, of one process; None if it does not say."""
        sizes = (self.of("data", "batch_size"), self.of("data", "seq_len"))
        parts = (*sizes, self.of("trainer", "accumulate_grad_batches") or 1)
        return math.prod(parts) if all(isinstance(part, int) for part in parts) else None

    @property
    def tokens(self) -> int | None:
        """Trained on."""
        return None if self.tokens_per_step is None else self.steps * self.tokens_per_step

    @property
    def flops(self) -> float | None:
        """Of its training, forward and backward."""
        return None if self.costs is None or self.tokens is None else self.tokens * self.costs.flops_per_token

    def state(self, metric: str) -> str:
        """ "finished", or how it is not; a finished run logs this metric no more before its last step."""
        curve = self.curves.get(metric)
        if curve is None:
            return f"has no {metric}"
        if not math.isfinite(curve.iloc[-1]):
            return "diverged"
        between = self.of("trainer", "log_every_n_steps")
        if metric.startswith("val/"):
            between = self.of("trainer", "val_check_interval")
            between = between // (self.of("trainer", "accumulate_grad_batches") or 1) if isinstance(between, int) else 1
        if self.max_steps is None or int(curve.index[-1]) + (between or 1) > self.max_steps:
            return "finished"
        return f"at step {self.steps:,} of {self.max_steps:,}"

    def all_settings(self) -> str:
        """All that changes its numbers but the seed, as one text."""
        data = self.config.get("data")
        data = {k: v for k, v in data.items() if k not in NO_SETTING} if isinstance(data, Mapping) else data
        trained = (self.max_steps, self.of("trainer", "accumulate_grad_batches"), self.of("trainer", "precision"))
        return json.dumps([self.config.get("model"), data, trained], sort_keys=True, default=str)

    def setting(self) -> str:
        """What a comparison holds fixed: the network but its residual, the text, and the tokens trained on."""
        data = ("corpus", "tokenizer", "seq_len")
        length = self.max_steps and self.tokens_per_step and self.max_steps * self.tokens_per_step
        fixed = [self.of("model", "config"), [self.of("data", key) for key in data], length]
        return json.dumps(fixed, sort_keys=True, default=str)


def read_runs(roots: Iterable[Path]) -> list[Run]:
    """All runs at or below these folders, each once, with their variants.

    Runs of one variant have one name but for `-seed=K` at its end, and the same settings.

    Raises:
        ValueError: a folder that is not there, or that holds no logs.
    """
    folders = dict.fromkeys(folder.resolve() for root in roots for folder in run_folders(root))
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    runs = [
        replace(run, name=f"{run.folder.parent.name}/{run.name}") if names.count(run.name) > 1 else run for run in runs
    ]
    settings: dict[str, set[str]] = {}
    for run in runs:
        settings.setdefault(SEED.sub("", run.name), set()).add(run.all_settings())
    return [
        replace(run, variant=short if len(settings[short := SEED.sub("", run.name)]) == 1 else run.name) for run in runs
    ]


def read_run(folder: Path) -> Run:
    """One run; what its folder does not say is left open."""
    config = _yaml(folder / "config.yaml")
    hparams = _yaml(folder / "hparams.yaml") or _yaml(next(iter(folder.glob("csv/version_*/hparams.yaml")), folder))
    model = {**hparams, **{key: value for key, value in _mapping(config.get("model")).items() if value is not None}}
    described = _mapping(model.get("residual"))
    path, options = str(described.get("class_path", "")), _mapping(described.get("init_args"))
    costs = None
    try:
        factory = strategy({"class_path": path, "init_args": options})
        options = {**defaults(factory.func), **options}  # pyrefly: ignore[bad-argument-type] - a class, which it checks
        sizes = {**_mapping(hparams.get("config")), **_mapping(model.get("config"))}
        sizes["vocab_size"] = sizes.get("vocab_size") or _mapping(hparams.get("config")).get("vocab_size")
        costs = costs_of(factory, sizes, _mapping(config.get("data")).get("seq_len"))
    except (ValueError, TypeError):  # of another version, or a strategy that is not installed here
        pass
    weights = _weights(folder)
    return Run(folder.name, folder, config, read_logs(folder), costs, weights, path.rpartition(".")[2], options)


def costs_of(factory: ResidualFactory, sizes: Mapping[str, Any], seq_len: int | None) -> Costs:
    """Of a model with these sizes, in sequences of so many tokens."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**sizes), factory)
    counts = parameters(model, model.residual.num_sites)
    per_token = flops(model.config, seq_len or model.config.max_seq_len, again=False).training
    return Costs(counts.total, sum(counts.sublayers), per_token)


def _mapping(value: Any) -> Mapping[str, Any]:
    """It, or nothing if it is none."""
    return value if isinstance(value, Mapping) else {}


def _yaml(path: Path) -> dict[str, Any]:
    """Plain values; nothing where there is no file, or none that can be read."""
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return said if isinstance(said, dict) else {}


def _weights(folder: Path) -> Weights | None:
    try:
        with np.load(folder / "depth_weights.npz", allow_pickle=False) as held:
            return Weights(held["weights"].astype(float), held["sites"], int(held["step"]))
    except (OSError, KeyError, ValueError):
        return None


def last(run: Run, metric: str) -> float:
    """The last value of a metric."""
    return float(run.curves[metric].iloc[-1])


def by_layer(run: Run, name: str, observed: int = 3) -> pd.Series | None:
    """`depth/<name>/<layer>` over layers, the mean of the last few observed steps; None if it was not logged."""
    found = {key: curve for key, curve in run.curves.items() if key.startswith(f"depth/{name}/")}
    if not found:
        return None
    means = {int(key.rpartition("/")[2]): float(curve.iloc[-observed:].mean()) for key, curve in found.items()}
    return pd.Series(means).sort_index()
