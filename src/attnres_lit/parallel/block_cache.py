"""The cross-stage cache: sources that a rank has seen, kept for its later virtual stages (arXiv 2603.15031, 4.1).

    forward     Keep: a source first seen here goes into the cache       Take: a later stage reads it
    backward    Take: its gradient is added up in the cache              Keep: the sum joins the source's own gradient

A source travels to a rank once, and so does its gradient back. An entry lives from the forward of the stage where it
was first seen to the backward of that stage, microbatch by microbatch.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function


class BlockCache:
    """The entries of one rank, by microbatch and the number that the source has in `Depth`."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], Tensor] = {}
        self.awaits: set[tuple[int, int]] = set()  # those that a backward will pass
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.bytes = 0
        self.peak_bytes = 0  # the most held at a time since `open`
        self.is_open = False

    def open(self) -> None:
        """Begin a batch. Raises RuntimeError if entries of an earlier one are left."""
        self.check_empty()
        self.is_open, self.peak_bytes = True, 0

    def close(self) -> None:
        """End a batch. Raises RuntimeError if entries are left."""
        self.is_open = False
        self.check_empty()

    def check_empty(self) -> None:
        """Raises RuntimeError, naming the entries, if any has outlived its microbatch."""
        if self.values:
            entries = ", ".join(f"source {number} of microbatch {at}" for at, number in list(self.values)[:3])
            raise RuntimeError(f"{len(self.values)} cached sources outlived their microbatch: {entries}")

    def clear(self) -> None:
        """Forget everything, after a batch that was not finished."""
        self.values.clear()
        self.awaits.clear()
        self.grads.clear()
        self.bytes, self.is_open = 0, False

    def put(self, microbatch: int, number: int, source: Tensor, awaits_backward: bool = True) -> None:
        """Keep a source; one that awaits no backward is forgotten by the last stage that takes it."""
        if not self.is_open:
            raise RuntimeError("the block cache is closed: it takes BlockCacheCallback, or open(), to begin a batch")
        assert (microbatch, number) not in self.values, "a source reaches a rank once"
        self.values[microbatch, number] = source.detach()
        if awaits_backward:
            self.awaits.add((microbatch, number))
        self.bytes += source.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def add_grad(self, microbatch: int, number: int, grad: Tensor) -> None:
        """Add what a later stage found."""
        before = self.grads.get((microbatch, number))
        self.grads[microbatch, number] = grad if before is None else before + grad

    def pop(self, microbatch: int, number: int) -> Tensor | None:
        """Forget a source; returns the gradient that later stages added up, if any did."""
        self.bytes -= self.values.pop((microbatch, number)).nbytes
        self.awaits.discard((microbatch, number))
        return self.grads.pop((microbatch, number), None)


class Keep(Function):
    """Identity on tensors first seen on this rank; those with a number in `kept` go into the cache."""

    @staticmethod
    def forward(
        ctx: Any, cache: BlockCache, microbatch: int, numbers: Sequence[int], kept: frozenset[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Put and pass on."""
        ctx.cache, ctx.microbatch, ctx.numbers, ctx.kept = cache, microbatch, numbers, kept
        differentiated = any(ctx.needs_input_grad)  # then backward passes here, and without gradients it does not
        for number, tensor in zip(numbers, tensors, strict=True):
            if number in kept:
                cache.put(microbatch, number, tensor, differentiated)
        return tuple(tensor.detach() for tensor in tensors)  # not views: a split backward detaches outputs in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient from here, and that of the later stages."""
        total = []
        for number, grad in zip(ctx.numbers, grads, strict=True):
            later = ctx.cache.pop(ctx.microbatch, number) if number in ctx.kept else None
            total.append(grad if later is None else grad + later)
        return (None, None, None, None, *total)


class Take(Function):
    """Sources out of the cache.

    `anchor` is an input of the stage that requires a gradient. It puts this node on the way from the stage's outputs to
    its inputs, so that a backward that stops at the inputs (zero bubble) passes here too.
    """

    @staticmethod
    def forward(
        ctx: Any, cache: BlockCache, microbatch: int, numbers: Sequence[int], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        """Read the cache."""
        ctx.cache, ctx.microbatch, ctx.numbers = cache, microbatch, numbers
        ctx.set_materialize_grads(False)
        return tuple(cache.values[microbatch, number].detach() for number in numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        """Leave the gradients in the cache."""
        for number, grad in zip(ctx.numbers, grads, strict=True):
            if grad is not None:
                ctx.cache.add_grad(ctx.microbatch, number, grad)
        return None, None, None, None
