"""A checkpoint, a file or a folder, is replaced as a whole: whenever a save is killed, one that loads is there.

It is written beside, as `<name>.tmp`, and then takes the name. A file replaces a file in one step; a folder cannot
replace anything that is there, so the old checkpoint steps aside as `<name>.old` until the new one has the name.
Between these two steps there is no `<name>`: whoever reads asks `located` first. What a killed save left is cleared by
the next one.
"""

import os
import shutil
from pathlib import Path

REST, INDEX = "meta.pt", ".metadata"  # in a folder, beside the shards: what is no tensor, and where each tensor is


def beside(path: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return path.parent / f"{path.name}.tmp"


def aside(path: Path) -> Path:
    """Where the old checkpoint is while a new one takes its name."""
    return path.parent / f"{path.name}.old"


def complete(path: Path) -> bool:
    """Whether there is a file, or a folder with all that a checkpoint needs beside its shards."""
    return path.is_file() or ((path / REST).is_file() and (path / INDEX).is_file())


def located(path: Path) -> Path:
    """Where the checkpoint of this name is: aside, if a save was killed just before the new one took the name."""
    return aside(path) if not complete(path) and complete(aside(path)) else path


def clear(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def begin(path: Path) -> Path:
    """An unused place beside, in a folder that exists. Returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(beside(path))
    return beside(path)


def commit(path: Path) -> None:
    """Give what was written beside its name; the files in it have been synced to the disk, as `sync` does."""
    new = beside(path)
    if new.is_dir():
        sync(new)
    if path.is_dir() or (path.exists() and new.is_dir()):
        # what is no checkpoint steps aside too, and stays there: it may be anything
        place = aside(path) if complete(path) else path.parent / f"{path.name}.was-no-checkpoint"
        clear(aside(path))
        path.rename(place)
    os.replace(new, path)
    sync(path.parent)  # the names themselves; only now may the old one go
    clear(aside(path))


def remove(path: Path) -> None:
    """Remove a checkpoint in such a way that no part of it keeps the name."""
    clear(aside(path))
    if path.exists():
        os.replace(path, begin(path))
        clear(beside(path))


def sync(path: Path) -> None:
    """Have a file, or the list of files in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
