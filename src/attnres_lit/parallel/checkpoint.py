"""Checkpoints that any layout of processes writes and any other loads: parameters go by their global names.

One device and DDP write a single file, Lightning's. Sharded layouts write a folder of the same name, every process what
it holds: torch's distributed checkpoint has the tensors, under `state_dict.<name>` and `optimizer.<name>.<key>`, and
`meta.pt` has the rest of Lightning's checkpoint, with the state of the optimizers but for its tensors. Whatever is read
here may be either of them, and is found where a killed save left it (see `atomic.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from attnres_lit.parallel.atomic import REST, begin, beside, commit, complete, sync
from attnres_lit.parallel.optimizer_state import merge, restore, take_apart
from attnres_lit.parallel.storage import Stored
from attnres_lit.parallel.together import all_gathered, rank, together

Checkpoint = dict[str, Any]  # as Lightning makes it


def write(path: str | Path, model: nn.Module, optimizers: Sequence[Optimizer] | None, rest: Mapping[str, Any]) -> None:
    """Save what every process holds as one folder that replaces the checkpoint of that name as a whole.

    All processes call it, with the same path, on a file system that all of them see.

    Args:
        path: of the checkpoint.
        model: the whole of it, sharded or not, or the part that this process holds, under global names. What several
            processes hold alike is written once.
        optimizers: of what this process holds, with as many groups on every process; None saves weights alone.
        rest: of Lightning's checkpoint, that of the first process counts; its `state_dict` and `optimizer_states` are
            taken from the model and the optimizers instead.

    Raises:
        OSError: it could not be written; on all processes. The checkpoint that was there is as it was.
    """
    path = Path(path)
    tensors = {f"state_dict.{name}": tensor for name, tensor in model.state_dict().items()}
    rest = {key: value for key, value in rest.items() if key not in ("state_dict", "optimizer_states")}
    if optimizers is not None:
        apart = [take_apart(optimizer, model) for optimizer in optimizers]
        tensors |= {key: tensor for _, its_tensors in apart for key, tensor in its_tensors.items()}
        rest["optimizer_states"] = merge(all_gathered([state for state, _ in apart]))
    together(lambda: begin(path) if rank() == 0 else None)
    try:
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(beside(path)),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        causes = "; ".join(" ".join(str(cause).split()) for cause, _ in error.failures.values())
        raise OSError(f"{path} could not be written: {causes}") from error
    together(lambda: _finish(path, rest) if rank() == 0 else None)


def write_file(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Save a whole checkpoint as a single file that replaces the checkpoint of that name as a whole. One process."""
    path = Path(path)
    _save(dict(checkpoint), begin(path))
    commit(path)


def _finish(path: Path, rest: Checkpoint) -> None:
    _save(rest, beside(path) / REST)
    commit(path)


def _save(checkpoint: Checkpoint, path: Path) -> None:
    torch.save(checkpoint, path)
    sync(path)


def describe(path: str | Path) -> Checkpoint:
    """All of a checkpoint but the data of its tensors: those of the model and the optimizers are on the device "meta".

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or it is something else.
    """
    stored = Stored(path)
    if stored.is_folder:
        return stored.whole(stored.empty("meta"))
    large = {key: value for key, value in stored.rest.items() if key in ("state_dict", "optimizer_states")}
    return stored.rest | tree_map_only(Tensor, lambda tensor: tensor.to("meta"), large)


def read_full(path: str | Path) -> Checkpoint:
    """A whole checkpoint, as Lightning has it in a file, in the memory of this process. Raises as `describe` does."""
    stored = Stored(path, mmap=False)
    if not stored.is_folder:
        return stored.rest
    tensors = stored.empty("cpu")
    stored.fill(tensors)
    return stored.whole(tensors)


def read_weights(path: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Fill tensors from the weights of a checkpoint, in place; each process reads its part. All processes call it.

    Args:
        path: of the checkpoint.
        weights: by their names in it; plain tensors or DTensors, on any device.

    Raises:
        ValueError: as `describe`; a weight is missing or has another shape. On all processes.
    """
    together(lambda: Stored(path).fill({f"state_dict.{name}": weight for name, weight in weights.items()}))


def read_optimizers(path: str | Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load optimizers from a checkpoint, each process for the parameters that it holds. All processes call it.

    Args:
        path: of the checkpoint.
        model: what this process holds of it, under global names.
        optimizers: of its parameters; fresh ones will do.

    Raises:
        ValueError: as `describe`; the checkpoint holds weights alone, or was written by other optimizers. On all
            processes.
    """
    together(lambda: restore(Stored(path), model, optimizers))


def held_elsewhere(names: Iterable[str]) -> set[str]:
    """The names that other processes hold and this one does not. All processes call it."""
    own = set(names)
    return set[str]().union(*all_gathered(own)) - own


def consolidate(ckpt: str, out: str, overwrite: bool = False) -> None:
    """Write a checkpoint of any layout as a single file, for validate, predict, a run on one device, and sharing.

    Args:
        ckpt: the checkpoint, a folder or a file.
        out: the file.
        overwrite: replace `out` if it is there.

    Raises:
        ValueError: as `describe`; `out` is there, or lies where no file can be.
    """
    if Path(out).exists() and not overwrite:
        raise ValueError(f"{out} is there already: choose another name, or add --overwrite")
    if Path(out).is_dir() and not complete(Path(out)):
        raise ValueError(f"{out} is a folder, and no checkpoint: choose another name")
    checkpoint = read_full(ckpt)
    try:
        write_file(out, checkpoint)
    except OSError as error:
        raise ValueError(f"{out} could not be written: {error.strerror}") from error
