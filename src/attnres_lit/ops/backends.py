"""Which engine runs a depth attention.

| backend    | runs on                     | needs                   |
|------------|-----------------------------|-------------------------|
| "eager"    | any device                  | torch                   |
| "compiled" | CPU, one head               | numba, extra `fast`     |
| "fla"      | CUDA, one head, key norm    | fla-core, extra `cuda`  |
| "auto"     | the fastest of these that is installed and fits |     |

All of them know the softmax of static queries. Its ablations (`ops/mixing.py`) run plain formulas of their own on any
device, whatever the backend.

Under `torch.compile`, `torch.export` and fake tensors "compiled" is "eager": the formulas are traced, and Inductor
fuses them for CPU and CUDA alike.
"""

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from attnres_lit.ops import eager

Backend = Literal["auto", "eager", "compiled", "fla"]
BACKENDS: tuple[str, ...] = get_args(Backend)
# module, extra and device type of a backend that is optional
EXTRAS: dict[Backend, tuple[str, str, str]] = {"compiled": ("numba", "fast", "cpu"), "fla": ("fla", "cuda", "cuda")}
INSTALLED: set[Backend] = {backend for backend, (module, *_) in EXTRAS.items() if find_spec(module) is not None}

log = logging.getLogger(__name__)


def check_backend(backend: str) -> None:
    """Refuse a backend that is unknown or not installed.

    Raises:
        ValueError: naming the choices, or the extra to install.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown depth-attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend in EXTRAS and backend not in INSTALLED:
        module, extra, _ = EXTRAS[backend]
        raise ValueError(
            f"depth-attention backend {backend!r} needs {module}: pip install 'attnres_lit[{extra}]', "
            "or choose auto or eager"
        )


def resolve(backend: Backend, sources: Sequence[Tensor], heads: int = 1) -> Backend:
    """The backend that will run: the one asked for, or "eager" where it does not fit this call.

    Raises:
        ValueError: as `check_backend`; sources on a device that `backend` never runs on.
    """
    check_backend(backend)
    device = sources[0].device.type
    if backend == "auto":
        backend = "fla" if device == "cuda" else "compiled" if device == "cpu" else "eager"
        if backend in EXTRAS and backend not in INSTALLED:
            if not torch.compiler.is_compiling():
                notice(f"depth attention runs eager; pip install 'attnres_lit[{EXTRAS[backend][1]}]' for fused kernels")
            return "eager"
    elif backend in EXTRAS and device not in (EXTRAS[backend][2], "meta"):
        raise ValueError(
            f"depth-attention backend {backend!r} needs sources on {EXTRAS[backend][2]}, got {device}; "
            "choose auto or eager"
        )
    if device == "meta" or (backend == "compiled" and (heads > 1 or _is_traced(sources[0]))):
        return "eager"
    return backend


def engine(backend: str) -> ModuleType:
    """The module with the formulas of a backend that `resolve` returned, "fla" excepted."""
    return import_module("attnres_lit.ops.cpu_kernels") if backend == "compiled" else eager


@cache
def inference_kernel() -> ModuleType | None:
    """The module with the read of inference of the backend "compiled", if that is installed."""
    return import_module("attnres_lit.ops.cpu_read") if "compiled" in INSTALLED else None


@cache
def notice(message: str) -> None:
    """Say something once per process."""
    log.warning(message)


def _is_traced(tensor: Tensor) -> bool:
    """Whether there are no numbers to compute with: a graph is being captured, or the tensor is fake or wrapped."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)
