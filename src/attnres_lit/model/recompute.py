"""What backward computes again instead of keeping it from the forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, no_grad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from attnres_lit.residual.base import Sources

Again = Literal["read"] | bool


class Recompute:
    """Activation checkpointing, as much of it as asked for.

    Args:
        again: "read": the input of every sublayer; true: everything inside a layer but the Sources it starts from.

    Raises:
        ValueError: an unknown `again`.
    """

    def __init__(self, again: Again) -> None:
        if again not in ("read", True, False):
            raise ValueError(f"checkpoint_activations={again!r} must be read, true or false")
        self.again: Again = again

    def layer(self, run: Callable[..., Sources], sources: Sources, *sites: int) -> Sources:
        """`run(sources, *sites)`; with true, only its Sources are kept for backward."""
        if self.again is not True or not torch.is_grad_enabled():
            return run(sources, *sites)
        sources = Sources(sources.done, sources.partial)  # what is ahead is cheaper to compute again than to keep
        return checkpoint(run, sources, *sites, use_reentrant=False, preserve_rng_state=False)

    def read(self, h: Tensor, read: Callable[[], Tensor]) -> AbstractContextManager[object]:
        """The context of a sublayer that reads `h`; with "read", backward calls `read` for it."""
        if self.again != "read" or not torch.is_grad_enabled():
            return nullcontext()
        return Forget(h, read)


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
