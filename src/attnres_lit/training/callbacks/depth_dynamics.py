"""How large the residual and its gradient are along depth (arXiv 2603.15031, Fig. 5)."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from attnres_lit.residual.base import Note, Residual, Sources
from attnres_lit.training.module import LanguageModel

Squares = dict[tuple[str, int], tuple[Any, int]]


class DepthDynamics(Callback):
    """Logs `depth/output_rms/<layer>` and `depth/grad_norm/<layer>`, of the batch of the logging process.

    In a pipeline: of the batch of its pipeline.

    A chosen step is observed as `observe` says; the numbers of the training do not change.

    Args:
        every_n_steps: optimizer steps from one observed step to the next; the first step is one.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1")
        self.every_n_steps = every_n_steps
        self.step = 0
        self.values: Squares = {}
        self.observing = ExitStack()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to observe, on a chosen step; of accumulated batches the last one counts."""
        self.step = trainer.global_step
        assert isinstance(pl_module, LanguageModel)
        if self.step % self.every_n_steps == 0:
            self.values = self.observing.enter_context(observe(*(part.residual for part in pl_module.runner.parts)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was observed, once the optimizer has stepped."""
        self.observing.close()
        # not `not self.values`: in a pipeline, a rank at whose sites no layer ends has none, and gathers all the same
        if self.step == trainer.global_step or self.step % self.every_n_steps:
            return
        assert isinstance(pl_module, LanguageModel)
        found = pl_module.runner.gather(roots(self.values))
        digits = len(str(pl_module.model.config.num_layers - 1))  # so that names sort by depth
        metrics = {f"depth/{name}/{layer:0{digits}}": v for each in found for (name, layer), v in each.items()}
        for logger in trainer.loggers:
            logger.log_metrics(dict(sorted(metrics.items())), step=self.step)
        self.values = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.observing.close()


@contextmanager
def observe(*residuals: Residual) -> Generator[Squares]:
    """Sums of squares of the residual, and of its gradient, after each layer, in all forwards and backwards within.

    Of the partial or, where the layer has just closed a block, of the source that it became (Full AttnRes: the newest
    source); with streams, of their mean, whose gradient is the sum of theirs.

    Args:
        residuals: the parts of a residual that run in this process.

    Returns:
        `{(name, layer): (sum of squares, elements)}`, filled as the passes go, for `roots`.
    """
    squares: Squares = {}

    def add(name: str, layer: int, x: Tensor) -> None:
        before, count = squares.get((name, layer), (0.0, 0))
        squares[name, layer] = before + norm(x) ** 2, count + x.numel()

    def watch(residual: Residual) -> None:
        write = residual.write

        def observed(sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
            sources = write(sources, output, site, note)
            layer, is_last_of_layer = divmod(site, 2)
            if is_last_of_layer:
                newest = sources.done[-1] if sources.partial is None else sources.partial
                with_streams = newest.dim() > output.dim()
                add("output_rms", layer, newest.detach().mean(-2) if with_streams else newest.detach())
                if newest.requires_grad:  # not in the first pass of reentrant activation checkpointing
                    newest.register_hook(lambda grad: add("grad_norm", layer, grad.sum(-2) if with_streams else grad))
            return sources

        residual.write = observed

    for residual in residuals:
        watch(residual)
    try:
        yield squares
    finally:
        for residual in residuals:
            del residual.write


def roots(squares: Squares) -> dict[tuple[str, int], float]:
    """Root mean squares of outputs and norms of gradients, the latter over the whole `(B, T, D)`."""
    means = [total / count if name == "output_rms" else total for (name, _), (total, count) in squares.items()]
    return dict(zip(squares, torch.stack(means).sqrt().tolist(), strict=True)) if means else {}  # one transfer for all


def norm(x: Tensor) -> Tensor:
    """Euclidean norm, summed in at least fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
