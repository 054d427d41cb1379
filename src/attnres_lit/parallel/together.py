"""What all processes do together: it succeeds on all of them or fails on all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Of this process; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_gathered(value: T) -> list[T]:
    """The values of all processes, in the order of their ranks. All of them call it."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T]) -> T:
    """Run something on every process; what fails on one of them fails on all, and none waits for it.

    Returns:
        What it returned on this process.

    Raises:
        ValueError, OSError, RuntimeError: what failed here, or else what failed first elsewhere.
    """
    outcomes: list[T] = []
    failure: Exception | None = None
    try:
        outcomes.append(action())
    except Exception as error:
        failure = error
    kind = next((each for each in (ValueError, OSError) if isinstance(failure, each)), RuntimeError)
    failures = all_gathered((kind, str(failure)) if failure else None)
    if failure is not None:
        raise failure
    for kind, message in filter(None, failures):
        raise kind(message)
    return outcomes[0]
