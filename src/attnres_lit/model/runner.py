"""How a batch goes through a model: all of it in this process, or the stages of a pipeline in several."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from attnres_lit.model.loss import Reduction, next_token_nats
from attnres_lit.model.transformer import Transformer
from attnres_lit.residual.base import Residual


class Part(NamedTuple):
    """The residual between two cuts of the model, with what tells its sources apart from those of other parts."""

    residual: Residual
    first_site: int = 0
    sources: tuple[int, ...] = ()  # the finished ones at its start, counted in the order in which the model makes them
    known: int = 0  # how many the model has made by then


class Runner(Protocol):
    """Runs batches; the same calls on every process that has a part of the model."""

    @property
    def parts(self) -> list[Part]:
        """The parts of the model in this process."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of those that share a model."""
        ...

    def run(self, tokens: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        """Nats of the targets `(B, T)` after the tokens `(B, T)`, reduced, on every process."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes that share the model, on each of them."""
        ...


class WholeModel:
    """The model in one process. See `Runner`."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @property
    def is_first(self) -> bool:
        """It is the only one."""
        return True

    @property
    def parts(self) -> list[Part]:
        """One."""
        return [Part(self.model.residual)]

    def run(self, tokens: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        """Nats of the targets `(B, T)`."""
        return next_token_nats(self.model(tokens), targets, reduction)

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]
