"""How large the residual and its gradient are along depth (arXiv 2603.15031, Fig. 5)."""

import math
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from attnres_lit.residual.base import Note, Residual, Sources
from attnres_lit.training.module import LanguageModel


class DepthDynamics(Callback):
    """Logs `depth/output_rms/<layer>` and `depth/grad_norm/<layer>`, of the batch of the logging process.

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
        self.values: dict[str, dict[int, Tensor]] = {}
        self.observing = ExitStack()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to observe, on a chosen step; of accumulated batches the last one counts."""
        self.step = trainer.global_step
        assert isinstance(pl_module, LanguageModel)
        if self.step % self.every_n_steps == 0 and trainer.is_global_zero:
            self.values = self.observing.enter_context(observe(pl_module.model.residual))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was observed, once the optimizer has stepped."""
        self.observing.close()
        if self.step == trainer.global_step or not self.values:
            return
        assert isinstance(pl_module, LanguageModel)
        digits = len(str(pl_module.model.config.num_layers - 1))  # so that names sort by depth
        values = {f"depth/{name}/{layer:0{digits}}": v for name, of in self.values.items() for layer, v in of.items()}
        metrics = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))  # one transfer for all
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.values = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the residual as it was."""
        self.observing.close()


@contextmanager
def observe(residual: Residual) -> Generator[dict[str, dict[int, Tensor]]]:
    """Root mean square and norm of the gradient of the residual after each layer, in a forward and backward within.

    Of the partial or, where the layer has just closed a block, of the source that it became (Full AttnRes: the newest
    source); with streams, of their mean, whose gradient is the sum of theirs. The norm is over the whole `(B, T, D)`.

    Returns:
        `{"output_rms": {layer: ...}, "grad_norm": {layer: ...}}`, filled as the passes go.
    """
    output_rms: dict[int, Tensor] = {}
    grad_norm: dict[int, Tensor] = {}
    write = residual.write

    def observed(sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        sources = write(sources, output, site, note)
        layer, is_last_of_layer = divmod(site, 2)
        if is_last_of_layer:
            newest = sources.done[-1] if sources.partial is None else sources.partial
            with_streams = newest.dim() > output.dim()
            stream = newest.detach().mean(-2) if with_streams else newest.detach()
            output_rms[layer] = norm(stream) / math.sqrt(stream.numel())
            if newest.requires_grad:  # not in the first pass of reentrant activation checkpointing

                def hook(grad: Tensor) -> None:
                    grad_norm[layer] = norm(grad.sum(-2) if with_streams else grad)

                newest.register_hook(hook)
        return sources

    residual.write = observed
    try:
        yield {"output_rms": output_rms, "grad_norm": grad_norm}
    finally:
        del residual.write


def norm(x: Tensor) -> Tensor:
    """Euclidean norm, summed in at least fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
