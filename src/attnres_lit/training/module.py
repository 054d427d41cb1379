"""The LightningModule: a language model, its loss, its optimizer and its checkpoints."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from attnres_lit.model import ResidualFactory, Transformer, TransformerConfig
from attnres_lit.model.init import materialize
from attnres_lit.model.loss import Reduction
from attnres_lit.model.recompute import Again
from attnres_lit.model.runner import Runner, WholeModel
from attnres_lit.ops import Backend
from attnres_lit.parallel.fsdp import shard
from attnres_lit.parallel.gradients import clip, total_norm
from attnres_lit.parallel.optimizer_state import add_names, group_names
from attnres_lit.residual import BlockAttnRes
from attnres_lit.training.checkpoint import check_resume, warm_start
from attnres_lit.training.hparams import INSTANTIATOR, describe, plain
from attnres_lit.training.optim import OptimConfig, restore_by_name


class LanguageModel(LightningModule):
    """A Transformer that learns to predict the next token.

    Batches are int64 `(B, T + 1)`: the model reads the first T tokens of a row and is asked for the last T.

    Built under `torch.device("meta")`, it holds no values until `configure_model`; no process then ever holds more of
    a sharded model than its shards and one layer.

    Args:
        config: sizes of the Transformer.
        residual: called with `(num_sites, dim)`: a strategy class, or a `functools.partial` of one with its options.
        optim: the optimizer and its schedule.
        compile: compile the sublayers, in place.
        fp32_residual: keep sources and partial in fp32 in mixed precision, instead of the dtype of the sublayers.
        checkpoint_activations: what backward computes again instead of keeping it: "read" the input of every sublayer,
            true everything inside a layer.
        depth_backend: what runs depth attention: auto, eager, compiled (CPU, extra `fast`) or fla (CUDA, extra `cuda`).
        init_from: checkpoint whose weights a new fit starts from; its optimizer and step count are left behind. Read
            when training starts, not on a resume. With another residual strategy, everything else is loaded and the
            residual starts fresh.

    Raises:
        ValueError: the residual cannot be described in plain values; a checkpoint does not fit.
    """

    def __init__(
        self,
        config: TransformerConfig,
        residual: ResidualFactory = BlockAttnRes,
        optim: OptimConfig = OptimConfig(),  # noqa: B008 - frozen
        compile: bool = False,
        fp32_residual: bool = False,
        checkpoint_activations: Again = False,
        depth_backend: Backend = "auto",
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        # not `init_from`: a checkpoint has weights of its own
        self.save_hyperparameters(
            {
                "config": plain(config, "config"),
                "residual": describe(residual),
                "optim": plain(optim, "optim"),
                "compile": compile,
                "fp32_residual": fp32_residual,
                "checkpoint_activations": checkpoint_activations,
                "depth_backend": depth_backend,
                **INSTANTIATOR,
            }
        )
        self.optim = optim
        self.compiled = compile
        self.init_from = init_from
        self.configured = False
        self.model = Transformer(config, residual, fp32_residual, checkpoint_activations, depth_backend)
        self.runner: Runner = WholeModel(self.model)  # a pipeline puts itself in its place

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `(B, T)` int64 to logits `(B, T, V)`."""
        return self.model(tokens)

    def configure_model(self) -> None:
        """Initial values for a model built on meta; compiled sublayers, in place, names unchanged; sharded parameters.

        Raises:
            ValueError: the strategy would split the inside of layers.
        """
        if self.configured:
            return
        self.configured = True
        strategy = getattr(self._trainer, "strategy", None)
        if hasattr(strategy, "distribute"):
            strategy.distribute(self.model, self.compiled)
            return
        if self.device_mesh is not None:
            self._shard(self.device_mesh)
            return
        materialize(self.model)
        if self.compiled:
            self.model.compile_sublayers()

    def _shard(self, mesh: DeviceMesh) -> None:
        """Over the data-parallel ranks of a ModelParallelStrategy."""
        if (split := mesh["tensor_parallel"].size()) > 1:
            raise ValueError(f"tensor_parallel_size={split}: layers are not split here, set it to 1")
        self.model.seed = self.trainer.strategy.broadcast(self.model.seed)  # every rank draws what it keeps
        param_dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
        shard(self.model, mesh["data_parallel"], param_dtype=param_dtype, compile=self.compiled)

    def nats(self, batch: Tensor, reduction: Reduction) -> Tensor:
        """Cross entropy of the next tokens of `(B, T + 1)`, in fp32: their mean, sum, or, with "none", `(B, T)`."""
        return self.runner.run(batch[:, :-1], batch[:, 1:], reduction)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean loss, nats per token."""
        loss = self.nats(batch, "mean")
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add a batch to the totals."""
        self._count(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add a batch to the totals."""
        self._count(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log-probability of every next token, fp32 `(B, T)`."""
        return -self.nats(batch, "none")

    def on_validation_epoch_start(self) -> None:
        """Begin the totals."""
        self._begin_totals()

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss`, `val/ppl`, `val/bpb`."""
        self._report("val")

    def on_test_epoch_start(self) -> None:
        """Begin the totals."""
        self._begin_totals()

    def on_test_epoch_end(self) -> None:
        """Log `test/loss`, `test/ppl`, `test/bpb`."""
        self._report("test")

    def configure_optimizers(self) -> Any:
        """AdamW, and its schedule stepped with it."""
        total, stop = self.optim.total_steps, self.trainer.max_steps
        if stop > total:
            rank_zero_warn(
                f"trainer.max_steps={stop} exceeds optim.total_steps={total}: later steps keep the final learning rate"
            )
        # a fused step would unscale fp16 gradients itself, after they are clipped
        optimizer, scheduler = self.optim.build(self.model, fused=self.trainer.precision != "16-mixed")
        restore_by_name(optimizer, self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and log the learning rate and the global gradient norm before clipping."""
        parameters = list(self.parameters())
        norm_of = getattr(self.trainer.strategy, "total_norm", total_norm)  # a strategy may spread them over stages
        norm = norm_of(parameters)
        self.log_dict({"lr": optimizer.param_groups[0]["lr"], "grad_norm": norm})
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip(parameters, gradient_clip_val, norm)

    def on_train_start(self) -> None:
        """Start from `init_from`; otherwise, after a resume, the optimizer's settings are those of this run."""
        if self.init_from is not None:
            warm_start(self.model, self.init_from, self.hparams)
            self.init_from = None
        optimizer, scheduler = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        assert isinstance(optimizer, Optimizer)
        assert isinstance(scheduler, LambdaLR)
        self.optim.apply(optimizer, scheduler)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Lightning first logs after `log_every_n_steps` steps; curves begin with the first."""
        accumulated, every = self.trainer.accumulate_grad_batches, self.trainer.log_every_n_steps  # pyrefly: ignore[missing-attribute]
        if self.trainer.global_step == 1 and batch_idx + 1 == accumulated and every > 1:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            for logger in self.loggers:
                logger.log_metrics(metrics, step=0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the parameters in the state of the optimizer, for a run that holds only a part of them."""
        for saved, optimizer in zip(checkpoint.get("optimizer_states", ()), self.trainer.optimizers, strict=False):
            if saved:  # a sharded strategy leaves it empty, and names them itself
                add_names(saved, group_names(optimizer, self))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture. Raises ValueError."""
        check_resume(checkpoint, self.hparams, self.state_dict())
        self.init_from = None

    def _begin_totals(self) -> None:
        precise = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        self.totals = torch.zeros(3, dtype=precise, device=self.device)  # nats, tokens, bytes of text
        token_bytes = getattr(self.trainer.datamodule, "token_bytes", None)  # pyrefly: ignore[missing-attribute]
        self.token_bytes = None if token_bytes is None else token_bytes.to(self.device)

    def _count(self, batch: Tensor) -> None:
        targets = batch[:, 1:]
        text = 0 if self.token_bytes is None else self.token_bytes[targets].sum()
        counts = (self.nats(batch, "sum"), targets.numel(), text)
        self.totals += torch.stack([torch.as_tensor(n, dtype=self.totals.dtype, device=self.device) for n in counts])

    def _report(self, split: str) -> None:
        """Over the whole split and all ranks; bits per byte count the loss, not the text, of ends of documents."""
        nats, tokens, text = self.trainer.strategy.reduce(self.totals, reduce_op="sum")
        metrics = {"loss": nats / tokens, "ppl": (nats / tokens).exp()}
        if self.token_bytes is not None:
            metrics["bpb"] = nats / (math.log(2) * text)
        for name, value in metrics.items():
            self.log(f"{split}/{name}", value, prog_bar=name == "loss", sync_dist=True)
