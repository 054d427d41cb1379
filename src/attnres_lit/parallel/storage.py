"""A checkpoint on the disk, a file or a folder of shards, as torch's distributed checkpoint reads it.

In a folder the keys of the tensors are `state_dict.<name>` and `optimizer.<name>.<key>`, with the global names of the
parameters. A single file, which is Lightning's, is read under the same keys. Nothing that is read can run code: files
are loaded with `weights_only=True`, and of the pickled index only the classes of an index are known.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from attnres_lit.model import huggingface
from attnres_lit.parallel.atomic import INDEX, REST, located


def _no_path(*parts: str) -> None:
    """In place of the folder's path when it was written, which nobody needs."""


KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{(module, "PosixPath"): _no_path for module in ("pathlib", "pathlib._local")},
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}


class IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index of tensors, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        """A known class or a dtype. Raises pickle.UnpicklingError for any other name."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint") from None


class FolderReader(FileSystemReader):
    """Reads shards; the index is checked before it is believed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            ValueError: it is damaged, it is no index, or a shard that it names is missing or too short.
        """
        folder = Path(self.path)
        try:
            found = IndexUnpickler(io.BytesIO((folder / INDEX).read_bytes())).load()
            ends = self._ends(found)
        except Exception as error:  # whatever it holds, it is not ours
            raise ValueError(f"{folder} is not a checkpoint, or it is damaged: its {INDEX} is no index") from error
        for name, end in ends.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size < end:
                raise ValueError(f"{folder} is damaged: its {name} is missing or cut off")
        return found

    def _ends(self, index: Metadata) -> dict[str, int]:
        """The bytes that each shard has at least. Raises an Exception if this is no index of tensors in the folder."""
        ends: dict[str, int] = {}
        for place in index.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        if any(Path(name).name != name for name in ends):
            raise ValueError("a shard lies outside of the folder")
        if not all(isinstance(each, TensorStorageMetadata) for each in index.state_dict_metadata.values()):
            raise ValueError("it holds more than tensors")
        return ends


class TensorsReader:
    """Reads from whole tensors in this process, such as those of a file that is mapped into memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read_metadata(self) -> Metadata:
        """Every tensor in one piece."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    tensor.shape,
                    [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)],
                )
                for key, tensor in self.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to prepare."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copy the parts that are asked for."""
        for item in plan.items:
            part = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(part)


class Stored:
    """A checkpoint on the disk: a file, or a folder, found where a killed save left it, or one of Hugging Face's.

    `rest` is Lightning's checkpoint; that of a folder lacks the tensors of the model and of the optimizers.

    Args:
        path: of the checkpoint.
        mmap: leave the tensors of a file where they are until they are copied.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or it is something else.
    """

    def __init__(self, path: str | Path, mmap: bool = True) -> None:
        self.path = located(Path(path))
        if huggingface.is_folder(self.path):
            self.is_folder, self.rest = False, pretrained(self.path)
            return
        self.is_folder = self.path.is_dir()
        if not self.path.exists():
            raise ValueError(f"there is no {self.path}")
        file = self.path / REST if self.is_folder else self.path
        try:
            self.rest: dict[str, Any] = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except Exception as error:  # whatever it holds, it is not ours
            raise ValueError(f"{self.path} is not a checkpoint, or it is damaged") from error
        needed = {"pytorch-lightning_version"} if self.is_folder else {"pytorch-lightning_version", "state_dict"}
        if not isinstance(self.rest, dict) or not needed <= self.rest.keys():
            raise ValueError(f"{self.path} is not a checkpoint of Lightning")

    @cached_property
    def reader(self) -> FolderReader | TensorsReader:
        """What reads the tensors. Those of the optimizers in a file have to be named before."""
        if self.is_folder:
            return FolderReader(self.path)
        tensors = {f"state_dict.{name}": tensor for name, tensor in self.rest["state_dict"].items()}
        for saved in self.rest.get("optimizer_states", ()):
            for name, number in numbers(saved["param_groups"]).items():
                for key, value in saved["state"].get(number, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{name}.{key}"] = value
        return TensorsReader(tensors)

    @cached_property
    def index(self) -> Metadata:
        """Of the tensors. Raises ValueError as the reader does."""
        return self.reader.read_metadata()

    def empty(self, device: str) -> dict[str, Tensor]:
        """A tensor like each that there is, on a device, without its data."""
        entries = self.index.state_dict_metadata.items()
        return {key: torch.empty(each.size, dtype=each.properties.dtype, device=device) for key, each in entries}  # pyrefly: ignore[missing-attribute]

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy into tensors what this process holds of them.

        Args:
            tensors: by their key; plain tensors or DTensors, on any device.

        Raises:
            ValueError: there is none of this key, or it has another shape; a shard is damaged.
        """
        for key, tensor in tensors.items():
            entry = self.index.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{self.path} does not fit: it has no {key}")
            if entry.size != tensor.shape:
                shapes = f"{tuple(entry.size)} in it, {tuple(tensor.shape)} here"
                raise ValueError(f"{self.path} does not fit: {key} is {shapes}")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self.index)  # pyrefly: ignore[bad-argument-type]
        try:
            self.reader.set_up_storage_reader(self.index, is_coordinator=True)
            self.reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:
            raise ValueError(f"{self.path} is damaged: a shard of it cannot be read") from error

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Lightning's checkpoint with these tensors, by their keys, in their places. Raises ValueError."""
        weights, owners = {}, {}
        for saved in self.rest.get("optimizer_states", ()):
            owners |= {name: (saved["state"], number) for name, number in numbers(saved["param_groups"]).items()}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            if part == "state_dict":
                weights[name] = tensor
            else:
                name, _, key = name.rpartition(".")
                if name not in owners:
                    raise ValueError(f"{self.path} is damaged: no optimizer in it has {name}")
                state, number = owners[name]
                state.setdefault(number, {})[key] = tensor
        return self.rest | {"state_dict": weights}


def pretrained(folder: Path) -> dict[str, Any]:
    """A checkpoint of Hugging Face's as Lightning's that holds weights alone. Raises ValueError."""
    config, residual = huggingface.read_config(folder)
    weights = huggingface.read_weights(folder, config)
    return {
        "hyper_parameters": {"config": asdict(config), "residual": residual},
        "state_dict": {f"model.{name}": weight for name, weight in weights.items()},
    }


def numbers(groups: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What stands for a parameter in the state of an optimizer, by its name."""
    return {
        name: number
        for group in groups
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False)
    }
