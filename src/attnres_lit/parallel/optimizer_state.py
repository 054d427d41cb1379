"""The state of optimizers by the names of the parameters, whichever process holds them."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attnres_lit.parallel.storage import Stored, numbers


def group_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of the parameters in every group of an optimizer, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def take_apart(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An optimizer's groups, and its state by name, without tensors; and its tensors by their key in a checkpoint."""
    state: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, group_names(optimizer, model), strict=True):
        groups.append({key: value for key, value in group.items() if key != "params"} | {"param_names": names})
        for parameter, name in zip(group["params"], names, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
                else:
                    state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": groups}, tensors


def merge(processes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `take_apart` says of each optimizer on every process, as torch has it of one that has all parameters."""
    merged = []
    for parts in zip(*processes, strict=True):
        groups, count = [], 0
        for same in zip(*(part["param_groups"] for part in parts), strict=True):
            names = list(dict.fromkeys(name for group in same for name in group["param_names"]))
            groups.append({**same[0], "param_names": names, "params": list(range(count, count + len(names)))})
            count += len(names)
        known = numbers(groups)
        state = {known[name]: values for part in parts for name, values in part["state"].items()}
        merged.append({"state": state, "param_groups": groups})
    return merged


def restore(stored: Stored, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load optimizers from a checkpoint, for the parameters that this process holds.

    Raises:
        ValueError: the checkpoint holds weights alone, or was written by other optimizers.
    """
    if (states := stored.rest.get("optimizer_states")) is None:
        raise ValueError(f"{stored.path} holds weights alone: start a new run from them, with init_from")
    if [len(saved["param_groups"]) for saved in states] != [len(each.param_groups) for each in optimizers]:
        raise ValueError(f"{stored.path} was written by other optimizers, or by one with other parameter groups")
    for saved, optimizer in zip(states, optimizers, strict=True):
        add_names(saved, group_names(optimizer, model))
    tensors: dict[str, dict[str, TensorStorageMetadata]] = {}  # those there are of a parameter
    for key, entry in stored.index.state_dict_metadata.items():
        part, _, name = key.partition(".")
        if part == "optimizer" and isinstance(entry, TensorStorageMetadata):
            name, _, key = name.rpartition(".")
            tensors.setdefault(name, {})[key] = entry
    parameters = dict(model.named_parameters())
    wanted: dict[str, Tensor] = {}
    loaded = []
    for saved, optimizer in zip(states, optimizers, strict=True):
        names, known, state = group_names(optimizer, model), numbers(saved["param_groups"]), {}
        for name in chain.from_iterable(names):
            if name not in known:
                why = f"its optimizer does not have {name}" if known else "the state of its optimizer has no names"
                raise ValueError(f"{stored.path}: {why}; resume it on one device, or start a new run from its weights")
            rooms = {key: room(name, parameters[name], entry) for key, entry in tensors.get(name, {}).items()}
            wanted |= {f"optimizer.{name}.{key}": tensor for key, tensor in rooms.items()}
            if found := saved["state"].get(known[name], {}) | rooms:
                state[known[name]] = found
        groups = [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [known[name] for name in its_names]}
            for group, its_names in zip(saved["param_groups"], names, strict=True)
        ]
        loaded.append({"state": state, "param_groups": groups})
    stored.fill(wanted)
    for optimizer, state in zip(optimizers, loaded, strict=True):
        optimizer.load_state_dict(state)  # which moves every tensor to where the optimizer wants it


def add_names(saved: dict[str, Any], names: Sequence[Sequence[str]]) -> None:
    """Name the parameters in the state of an optimizer that has all of them, in its order, unless they have names."""
    for group, its_names in zip(saved["param_groups"], names, strict=True):
        if len(group["params"]) == len(its_names):
            group.setdefault("param_names", list(its_names))


def room(name: str, parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """An empty tensor for a part of a parameter's state, spread over processes as the parameter is.

    Raises:
        ValueError: the parameter is sharded, and this part of its state has neither its shape nor a single number.
    """
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and parameter.dim():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and entry.size:
        raise ValueError(f"the optimizer's state of {name} has the shape {tuple(entry.size)}: it cannot be sharded")
    return torch.empty(entry.size, dtype=dtype)
