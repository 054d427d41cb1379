"""Forget an activation that is cheap to compute again."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, no_grad
from torch.autograd.graph import saved_tensors_hooks


class Forget(saved_tensors_hooks):
    """Inside this context autograd does not keep `tensor`; backward asks `again` for it.

    Args:
        tensor: an input of the operations inside.
        again: returns the same numbers; called without autograd, once for every operation that saved the tensor.
    """

    def __init__(self, tensor: Tensor, again: Callable[[], Tensor]) -> None:
        identity = _identity(tensor)

        def pack(saved: Tensor) -> Any:
            return again if _identity(saved) == identity else saved

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            with no_grad():
                return kept()

        super().__init__(pack, unpack)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
