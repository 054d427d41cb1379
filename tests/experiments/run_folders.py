"""Folders of runs as `fit` leaves them, with curves that a test chooses."""

import csv

import numpy as np
import yaml

from attnres_lit.experiments.records import costs_of
from attnres_lit.experiments.scaling import PFLOPS_DAY
from attnres_lit.inference.load import strategy

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2}
TOKENS = 8 * 16  # of a step


def write_run(root, name, strategy="PreNorm", options=None, seed=0, rows=(), sizes=None, max_steps=40, version=0):
    """A folder with config.yaml, hparams.yaml and one CSV log of `(optimizer steps, {metric: value})`."""
    folder = root / name
    residual = {"class_path": f"attnres_lit.{strategy}", "init_args": options or {}}
    config = {
        "seed_everything": seed,
        "trainer": {"max_steps": max_steps, "val_check_interval": 20, "log_every_n_steps": 10},
        "model": {"config": {**SIZES, **(sizes or {})}, "residual": residual},
        "data": {"corpus": {"class_path": "PythonStdlib"}, "seq_len": 16, "batch_size": 8, "root": "data"},
    }
    log = folder / f"csv/version_{version}/metrics.csv"
    log.parent.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "hparams.yaml").write_text(yaml.safe_dump({"config": {"vocab_size": 257}}))
    keys = ["step", *sorted({key for _, row in rows for key in row})]
    with log.open("w", newline="") as file:
        writer = csv.DictWriter(file, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"step": step - 1, **row} for step, row in rows)
    return folder


def ending_at(loss, **others):
    """Two validations, the last one of this value."""
    return [(20, {"val/loss": loss + 1}), (40, {"val/loss": loss, **others})]


def compute_of(sizes, max_steps=40):
    """PFLOP/s-days of a run."""
    factory = strategy({"class_path": "attnres_lit.PreNorm"})
    costs = costs_of(factory, {**SIZES, **sizes, "vocab_size": 257}, 16)
    return costs.flops_per_token * TOKENS * max_steps / PFLOPS_DAY


def write_weights(folder, table):
    """`depth_weights.npz`."""
    np.savez(folder / "depth_weights.npz", weights=np.float32(table), sites=np.arange(len(table)), step=40)
