"""The folder of a run: its name, its checkpoints, and that no other run disturbs it."""

import re
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from jsonargparse import Namespace

from attnres_lit.checks import class_of
from attnres_lit.parallel.atomic import located
from attnres_lit.parallel.checkpoint import describe
from attnres_lit.training.hparams import defaults


def run_name(residual: Namespace) -> str:
    """The strategy's class, and those of its options that are not the defaults: `BlockAttnRes-num_blocks=4`."""
    strategy = class_of(residual)
    usual, options = defaults(strategy), residual.get("init_args") or Namespace()
    changed = [f"{key}={value}" for key, value in vars(options).items() if value != usual.get(key)]
    return re.sub(r"[^\w=.,-]", "", "-".join([strategy.__name__, *changed]))


def substitute(config: Any, folder: str) -> Any:
    """Every "{run}" in the strings of a config becomes the run's folder."""
    if isinstance(config, str):
        return config.replace("{run}", folder)
    if isinstance(config, Namespace):
        return Namespace(**{key: substitute(value, folder) for key, value in vars(config).items()})
    if isinstance(config, list):
        return [substitute(value, folder) for value in config]
    return config


def find_checkpoint(folder: Path, which: str) -> Path:
    """The path of a checkpoint: `<folder>/checkpoints/<which>.ckpt` for "last" and "best", else `which`.

    If a save was killed before a new one took that name, the path is that of the old one.

    Raises:
        ValueError: the run has no such checkpoint; the message names the runs that have one.
    """
    named = which in ("last", "best")
    path = folder / "checkpoints" / f"{which}.ckpt" if named else Path(which)
    path = located(path)
    if named and not path.exists():
        others = sorted(str(p.parents[1]) for p in folder.parent.glob(f"*/checkpoints/{which}.ckpt"))
        hint = f"; runs that have one: {', '.join(others)} (choose with --name)" if others else ""
        raise ValueError(f"--ckpt_path {which}: there is no {path}{hint}")
    return path


def check_readable(path: Path, flag: str) -> dict[str, Any]:
    """Before a run is touched: what the checkpoint holds, without its data. Raises ValueError that names the flag."""
    try:
        return describe(path)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def claim(folder: Path) -> FileLock:
    """Hold a run's folder until the lock is released, so that no other run moves it aside or writes into it.

    Raises:
        ValueError: another process trains there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"{folder} is the folder of a run that is going on: choose another --name") from None
    return lock


def move_aside(folder: Path) -> Path | None:
    """Rename an existing run to `<folder>.1`, `.2`, ...: nothing is overwritten. Returns where it went."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
