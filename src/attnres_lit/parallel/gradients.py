"""The norm of a gradient whose parts lie in several processes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_norm(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None = None,
    counted: Callable[[nn.Parameter], bool] | None = None,
) -> Tensor:
    """Euclidean norm of all gradients, the same scalar on every process, summed in at least fp32.

    Every process of the meshes and of `group` must call it.

    Args:
        parameters: those of this process; their gradients are plain tensors, or DTensors on any mesh, each already
            averaged over data-parallel ranks.
        group: the processes that hold other parameters of the model, as the stages of a pipeline do; None: there are
            none.
        counted: whether a parameter counts here. Of the processes of `group` that hold a copy of it, one should say so.
    """
    whole: list[Tensor] = []
    shards: dict[tuple[Any, ...], list[Tensor]] = {}  # by the mesh, and its axes that hold different parts
    device = None
    for parameter in parameters:
        gradient = parameter.grad
        device = parameter.device
        if gradient is None or (counted and not counted(parameter)):
            continue
        if not isinstance(gradient, DTensor):
            whole.append(gradient)
            continue
        assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not yet reduced"
        axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
        shards.setdefault((gradient.device_mesh, axes), []).append(gradient.to_local())
    if not shards and group is None:
        return _norm(whole, device)
    total = _norm(whole, device).square()
    for (mesh, axes), parts in shards.items():
        square = _norm(parts, device).square()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every plain gradient by its mean over `group`, the replicas; those of DTensors are averages already."""
    size = dist.get_world_size(group)
    grads = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if size > 1:
        for work in [dist.all_reduce(grad.div_(size), group=group, async_op=True) for grad in grads]:
            assert work is not None
            work.wait()


def clip(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale the gradients in place so that a total norm of `norm` becomes at most `limit`."""
    gradients = (parameter.grad for parameter in parameters)
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # without a branch, which would wait for the device
    if parts:
        torch._foreach_mul_(parts, factor)


def _norm(tensors: list[Tensor], device: torch.device | None) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(tensors, 2, dtype)
    return torch.linalg.vector_norm(torch.stack(norms))
