"""The seam: what a sublayer reads from depth, and what happens to its output.

The model calls, once per forward, `open`; then `read` and `write` at every site; then `exit`. A strategy is one object
for the whole depth and owns all depth parameters, keyed by site.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from attnres_lit.ops import Backend

Note = tuple[Tensor, ...]


class Sources(NamedTuple):
    """The immutable state carried through depth: a pytree that can cross a checkpoint or a pipeline stage."""

    done: tuple[Tensor, ...]  # finished sources, oldest first, each (B, T, D)
    partial: Tensor | None  # the sum still being written: (B, T, D), or (B, T, n, D) with n streams
    ahead: tuple[Tensor, ...] = ()  # derived values for later sites: always droppable, never cross a boundary

    @property
    def stream(self) -> Tensor:
        """The partial, for strategies that always have one."""
        assert self.partial is not None
        return self.partial


class Residual(nn.Module, ABC):
    """Base of every strategy.

    A subclass takes `num_sites` and `dim` first, then its own options; it keeps its weights as plain parameters, sets
    them in `reset_parameters` and calls that last in its constructor. `read` and `write` change nothing in place and
    store nothing on the module.

    Args:
        num_sites: sublayers of the whole model, 2 x num_layers.
        dim: model width D.
    """

    starts_as_prenorm = False  # whether the initial values make the model compute what PreNorm would
    depth_backend: Backend = "auto"  # of depth attention, where a strategy has it; set by the model
    recomputed: bool = False  # whether backward computes reads again, which leaves nothing ahead; set by the model
    split_backward: bool = False  # whether backward may run in two parts, inputs then weights; set by a pipeline

    def __init__(self, num_sites: int, dim: int) -> None:
        super().__init__()
        self.num_sites = num_sites
        self.dim = dim

    @abstractmethod
    def open(self, embedding: Tensor) -> Sources:
        """Embedding `(B, T, D)` into the Sources that site 0 reads."""

    @abstractmethod
    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """Input `(B, T, D)` of the sublayer at `site`, and a tuple of tensors that `write` will be given."""

    @abstractmethod
    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """Sources after the sublayer at `site` returned `output` `(B, T, D)`."""

    @abstractmethod
    def exit(self, sources: Sources) -> Tensor:
        """What the final norm reads, `(B, T, D)`."""

    def weights(self, sources: Sources, site: int) -> Tensor | None:
        """Depth-attention weights of `site` (`num_sites`: of the exit), `(S, B, T)` or `(S, B, T, H)`; None without."""
        return None

    def read_scale(self, site: int) -> float:
        """What `site` reads (`num_sites`: the exit) at the initial values, as a multiple of what PreNorm would read.

        The norm behind it shrinks its eps by the square: the model then computes at the start what PreNorm would, even
        where eps is not small, as in pretrained models. It stays as training moves the values: eps is there to keep a
        norm from dividing by zero, and a read that is not far smaller than at the start does not notice it.
        """
        return 1.0

    def reset_parameters(self) -> None:
        """Set the initial values of this module's own parameters; also called after materialising from meta."""

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that take weight decay; all others of the strategy do not."""
        return ()
