"""Pipeline parallelism under a Lightning Trainer: the strategy, and the callback that minds the block cache."""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from attnres_lit.model import Transformer
from attnres_lit.model.init import materialize
from attnres_lit.parallel.block_cache import BlockCache
from attnres_lit.parallel.fsdp import shard
from attnres_lit.parallel.gradients import average, total_norm
from attnres_lit.parallel.launch import EndsTogether
from attnres_lit.parallel.schedule import Pipeline
from attnres_lit.parallel.settings import Cache, PipelineSettings, check_pipeline
from attnres_lit.parallel.sharded import ShardedCheckpoint
from attnres_lit.parallel.stage import Layout, Stage, cut_model, hold


class PipelineStrategy(ShardedCheckpoint, EndsTogether, ModelParallelStrategy):
    """Stages of the model on several processes, and replicas of the pipeline on the rest.

    The ranks of a pipeline read the same batches, split into `num_microbatches` equal parts; replicas read different
    ones, and an optimizer step takes the mean of their gradients. `LanguageModel.configure_model` calls `distribute`.

    Args:
        pipeline_parallel_size: ranks P of a pipeline; "auto": all processes.
        num_microbatches: M, parts of a batch.
        schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS or InterleavedZeroBubble.
        virtual_stages: V, stages on each rank; more than 1 with the last three schedules.
        cache_blocks: whether a rank keeps the sources it has seen for its later stages, so that none is sent to it
            twice; "auto": where that saves anything.
        split_points: first sites of all P x V stages but the first; null balances what the stages cost.
        fully_shard: shard parameters and optimizer state over the replicas (FSDP2), instead of a copy on each.
        timeout: seconds after which a rank that waits for another gives up; at the start, at least 60.

    Raises:
        ValueError: settings that do not go together, or not with the model, the batch or the number of processes.
    """

    group: Any  # process group: the ranks of this rank's pipeline, in order
    pipeline: Pipeline  # from `distribute` on

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        num_microbatches: int = 4,
        schedule: str = "1F1B",
        virtual_stages: int = 1,
        cache_blocks: Cache = "auto",
        split_points: list[int] | None = None,
        fully_shard: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timedelta(seconds=timeout))
        self.pipeline_parallel_size = pipeline_parallel_size
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.virtual_stages = virtual_stages
        self.cache_blocks = cache_blocks
        self.split_points = split_points
        self.fully_shard = fully_shard
        self.cache = BlockCache()
        self.shared: dict[str, tuple[int, Size]] = {}  # parameters of several stages: the first rank, and the shape
        self.aside: list[tuple[nn.Parameter, Tensor | None]] = []

    @property
    def module(self) -> Any:
        """The LanguageModel."""
        return self.lightning_module

    @property
    def settings(self) -> PipelineSettings:
        """What is asked for, with the number of ranks that "auto" stands for. Raises ValueError if it cannot be."""
        ranks, processes = self.pipeline_parallel_size, self.num_processes * self.num_nodes
        if ranks == "auto":
            ranks = processes
        if ranks < 1 or processes % ranks:
            raise ValueError(f"pipeline_parallel_size={ranks} must divide the number of processes, {processes}")
        return PipelineSettings(ranks, self.num_microbatches, self.schedule, self.virtual_stages, self.cache_blocks)

    @property
    def stages(self) -> str:
        """Those of this rank, in words; empty before `distribute`."""
        if not hasattr(self, "pipeline"):
            return ""
        mine, total = self.pipeline.stages, self.pipeline.stages[0].layout.num_stages
        return f"stage{'s' * (len(mine) > 1)} {', '.join(str(each.index) for each in mine)} of {total}"

    def cut(self, model: Transformer, seq_len: int, batch_size: int | None, compile: bool) -> Layout:
        """How this pipeline cuts a model, whose sublayers may be on meta; it stays whole.

        Args:
            model: the model.
            seq_len: tokens of a sequence.
            batch_size: sequences of a batch; None where it is not known yet.
            compile: whether sublayers will be compiled.

        Raises:
            ValueError: what is asked for does not go together, or not with the model or the batch.
        """
        asked = self.settings
        check_pipeline(asked, batch_size, model.config.tie_embeddings, compile)
        model.residual.split_backward = self.schedule == "InterleavedZeroBubble"
        layout = cut_model(model.config, model.residual, seq_len, asked, self.split_points)
        name = type(model.residual).__name__
        if self.fully_shard and (shared := layout.shared_parameters()):
            raise ValueError(
                f"fully_shard=true needs every parameter in one stage: {name} uses its {next(iter(shared))} in several"
                + (" (set two_phase to auto)" if getattr(model.residual, "two_phase", None) is True else "")
            )
        if model.residual.split_backward and (reused := layout.reused_parameters()):
            raise ValueError(
                f"schedule InterleavedZeroBubble needs every parameter at one site: {name} uses its {reused[0]} at "
                "several; choose Interleaved1F1B"
            )
        return layout

    def setup_environment(self) -> None:
        """Also arrange the processes: consecutive ones are replicas, and hold the same part of the model."""
        super().setup_environment()  # has a mesh of its own
        ranks = self.settings.pipeline_parallel_size
        shape, names = (ranks, self.world_size // ranks), ("pipeline", "data_parallel")
        self._device_mesh = self.module._device_mesh = init_device_mesh(
            self.root_device.type, shape, mesh_dim_names=names
        )
        # torch would give it a timeout of its own, and a receive keeps the one that its group began with
        pipelines = self._device_mesh.mesh.T.tolist()
        self.group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=self._timeout)
        self.limit_waiting()

    def distribute(self, model: Transformer, compile: bool) -> None:
        """Leave of a model, built the same on all ranks or on meta, the stages of this rank. Raises as `cut`."""
        trainer, replicas = self.module.trainer, self.device_mesh["data_parallel"]
        model.seed = self.broadcast(model.seed)
        layout = self.cut(model, getattr(trainer.datamodule, "seq_len", model.config.max_seq_len), None, compile)
        shapes = {name: parameter.shape for name, parameter in model.residual.named_parameters()}
        self.shared = {name: (first, shapes[name]) for name, first in layout.shared_parameters().items()}
        group, context = self.group, self.precision_plugin.forward_context
        mine = range(dist.get_rank(group), layout.num_stages, layout.num_ranks)
        stages = [Stage(model, layout, index, self.cache, context) for index in mine]
        for stage in stages:
            materialize(stage.model)
            stage.to(self.root_device)
            for parameter in stage.parameters():  # replicas must start equal, with or without a seed
                dist.broadcast(parameter.detach(), group=replicas.get_group(), group_src=0)
            if compile:
                stage.model.compile_sublayers()
            if self.fully_shard:
                dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else None
                shard(stage.model, replicas, root=stage, param_dtype=dtype, reshard_after_forward=False)
        hold(model, stages)
        for name, value in self._shared(model, lambda parameter: parameter.detach()):
            dist.broadcast(value, group=group, group_src=self.shared[name][0])
        self.pipeline = Pipeline(stages, self.schedule, self.num_microbatches, self.root_device, group)
        self.module.runner = self.pipeline
        self._say_how_it_is_cut()
        if not any(isinstance(each, BlockCacheCallback) for each in trainer.callbacks):
            trainer.callbacks.append(BlockCacheCallback())

    def _say_how_it_is_cut(self) -> None:
        """In one line, on rank 0: a model summary sees the part of that rank alone."""
        held = {}
        for stage in self.pipeline.stages:
            held[stage.index] = stage.sites, sum(parameter.numel() for parameter in stage.parameters())
        words = []
        for rank, of_rank in enumerate(self.pipeline.gather(held)):
            ranks = "/".join(map(str, self.device_mesh.mesh[rank].tolist()))
            words += [(i, f"{i} on rank {ranks}, sites {sites}, {n:,} parameters") for i, (sites, n) in of_rank.items()]
        rank_zero_info("Stages: " + "; ".join(text for _, text in sorted(words)))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch: a schedule does both in one, with autocast in the forward of each stage.

        Lightning zeroes the gradients between this and `backward`, so they are set aside until then.
        """
        self.pipeline.accumulated = self.module.trainer.accumulate_grad_batches
        loss = self.module.training_step(*args, **kwargs)
        self.aside = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        return loss.requires_grad_()  # a leaf: its backward does nothing

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Put the gradients back."""
        for parameter, grad in self.aside:
            parameter.grad = grad

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """A step with gradients that all replicas agree on; it leaves none, since the next batch adds to them."""

        def synchronized() -> Any:
            result = closure()
            self._sum_shared_gradients()
            average(self.module.parameters(), self.device_mesh["data_parallel"].get_group())
            return result

        result = super().optimizer_step(optimizer, synchronized, *args, **kwargs)
        optimizer.zero_grad()
        return result

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all stages, on every rank."""
        group = self.group
        counted_elsewhere = {name for name, (first, _) in self.shared.items() if first != dist.get_rank(group)}
        names = {parameter: name for name, parameter in self.module.model.residual.named_parameters()}
        return total_norm(parameters, group, counted=lambda parameter: names.get(parameter) not in counted_elsewhere)

    def _sum_shared_gradients(self) -> None:
        """Of parameters that several stages use; a rank that has no such stage adds nothing."""

        def gradient(parameter: nn.Parameter) -> Tensor:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad

        for _, grad in self._shared(self.module.model, gradient):
            dist.all_reduce(grad, group=self.group)

    def _shared(self, model: Transformer, of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Something of every shared parameter, in one order on all ranks; zeros on a rank that has it not."""
        held, dtype = dict(model.residual.named_parameters()), next(model.parameters()).dtype
        for name, (_, shape) in self.shared.items():
            yield name, of(held[name]) if name in held else torch.zeros(shape, dtype=dtype, device=self.root_device)


class BlockCacheCallback(Callback):
    """Minds the block cache of every rank, and logs what it saves; `PipelineStrategy` adds one if there is none.

    Opens the cache before a batch. After it, an entry that has outlived its microbatch is an error. Clears the cache
    after evaluation and after an exception.

    Logs, for a batch and all processes together: `pipeline/bytes_sent`, forward and backward; `pipeline/bytes_saved`,
    what sending all Sources would add to it. And `pipeline/peak_cached_bytes`, the most that a rank held at a time.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the cache."""
        strategy = _strategy(trainer)
        strategy.pipeline.sent.clear()
        strategy.cache.open()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close it, and log."""
        cache, pipeline = _strategy(trainer).cache, _strategy(trainer).pipeline
        cache.close()
        sent, all_sources = pipeline.sent.total(), pipeline.bytes_without_cache(batch[:, 1:].shape)
        for name, value in {"bytes_sent": sent, "bytes_saved": all_sources - sent}.items():
            pl_module.log(f"pipeline/{name}", float(value), sync_dist=True, reduce_fx="sum")
        pl_module.log("pipeline/peak_cached_bytes", float(cache.peak_bytes), sync_dist=True, reduce_fx="max")

    def _open(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        _strategy(trainer).cache.open()

    def _close(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        _strategy(trainer).cache.close()

    def _clear(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        _strategy(trainer).cache.clear()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _open
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _close
    on_validation_end = on_test_end = on_predict_end = on_exception = _clear


def _strategy(trainer: Trainer) -> PipelineStrategy:
    if not isinstance(trainer.strategy, PipelineStrategy):
        raise ValueError("BlockCacheCallback belongs to a PipelineStrategy: remove it, or choose that strategy")
    return trainer.strategy
