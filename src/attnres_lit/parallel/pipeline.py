"""Pipeline parallelism under a Lightning Trainer: the strategy, and the callback that minds the block cache."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attnres_lit.model import Transformer
from attnres_lit.model.init import materialize
from attnres_lit.parallel.block_cache import BlockCache
from attnres_lit.parallel.fsdp import shard
from attnres_lit.parallel.gradients import total_norm
from attnres_lit.parallel.schedule import Pipeline
from attnres_lit.parallel.settings import Cache, PipelineSettings, check_pipeline
from attnres_lit.parallel.stage import Layout, Stage, cut_model, hold


class PipelineStrategy(ModelParallelStrategy):
    """Stages of the model on several ranks, replicas of the pipeline on the rest.

    The ranks of a pipeline read the same batches, each of `num_microbatches` equal parts; replicas read different ones,
    and the gradients of an optimizer step are their mean. Precision is fp32, bf16-mixed or bf16-true.

    Args:
        pipeline_parallel_size: ranks P of a pipeline; "auto": all there are.
        num_microbatches: M, into which every batch is split.
        schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS or InterleavedZeroBubble.
        virtual_stages: V, stages on each rank; above 1 for the last three schedules.
        cache_blocks: whether a rank keeps the sources that it has seen for its later stages, so that none is sent to
            it twice; "auto": where that saves anything.
        split_points: first sites of all P x V stages but the first; null balances their cost.
        fully_shard: shard parameters and optimizer state over the replicas (FSDP2) instead of copying them.
        timeout: seconds after which a rank that waits for another gives up.

    Raises:
        ValueError: settings that do not go together, or not with the model, the batch or the number of processes.
    """

    def __init__(
        self,
        pipeline_parallel_size: int | str = "auto",
        num_microbatches: int = 4,
        schedule: str = "1F1B",
        virtual_stages: int = 1,
        cache_blocks: Cache = "auto",
        split_points: list[int] | None = None,
        fully_shard: bool = False,
        timeout: float = 1800,
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
        self.pipeline: Pipeline | None = None
        self.shared: list[str] = []  # parameters of the residual that several ranks use

    @property
    def settings(self) -> PipelineSettings:
        """What is asked for. Raises ValueError if the processes do not divide into pipelines."""
        ranks, processes = self.pipeline_parallel_size, self.num_processes * self.num_nodes
        if ranks == "auto":
            ranks = processes
        if processes % ranks:
            raise ValueError(f"pipeline_parallel_size={ranks} must divide the number of processes, {processes}")
        return PipelineSettings(ranks, self.num_microbatches, self.schedule, self.virtual_stages, self.cache_blocks)

    def cut(self, model: Transformer, seq_len: int, batch_size: int | None, compiled: bool) -> Layout:
        """How this pipeline cuts a model, which may be on meta; nothing is moved.

        Args:
            model: the whole model.
            seq_len: tokens of a sequence.
            batch_size: sequences in a batch, None where it is not known yet.
            compiled: whether sublayers will be compiled.

        Raises:
            ValueError: what is asked for does not go together, or not with the model or the batch.
        """
        asked, config = self.settings, model.config
        check_pipeline(asked, batch_size, config.tie_embeddings, compiled)
        materialize(model, "residual")
        return cut_model(config, model.residual, seq_len, asked, self.split_points)

    def setup_environment(self) -> None:
        """Also arrange the processes: consecutive ones are replicas of a stage and hold the same part of the model."""
        super().setup_environment()  # builds a mesh of its own, too
        ranks = self.settings.pipeline_parallel_size
        shape, names = (ranks, self.world_size // ranks), ("pipeline", "data_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh

    def distribute(self, model: Transformer, compile: bool) -> None:
        """Leave of `model` the stages of this rank, with values. Raises ValueError, as `cut`."""
        trainer, group = self.lightning_module.trainer, self.device_mesh["pipeline"].get_group()
        seq_len = getattr(trainer.datamodule, "seq_len", model.config.max_seq_len)
        layout = self.cut(model, seq_len, None, compile)
        self.shared = layout.shared_parameters()
        if self.shared and self.fully_shard:
            raise ValueError(
                f"fully_shard=true needs parameters of one stage each: {type(model.residual).__name__} uses "
                f"residual.{next(iter(self.shared))} in several"
            )
        self.shapes = {name: model.residual.get_parameter(name).shape for name in self.shared}
        model.residual.split_backward = self.schedule == "InterleavedZeroBubble"
        mine = range(dist.get_rank(group), layout.num_stages, layout.num_ranks)
        stages = [Stage(model, layout, index, self.cache, self.precision_plugin.forward_context) for index in mine]
        model.seed = self.broadcast(model.seed)
        replicas = self.device_mesh["data_parallel"]
        for stage in stages:
            materialize(stage.model)
            stage.to(self.root_device)
            for parameter in stage.parameters():  # with a seed, the same on all replicas already
                dist.broadcast(parameter.detach(), group=replicas.get_group(), group_src=0)
            if self.fully_shard:
                dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else None
                shard(stage.model, replicas, root=stage, param_dtype=dtype, reshard_after_forward=False)
            if compile:
                for sublayer in stage.model.sublayers.values():
                    sublayer.compile()
        hold(model, stages)
        self.pipeline = Pipeline(stages, self.schedule, self.num_microbatches, self.root_device, group)
        self.lightning_module.run = self.pipeline.run
        if not any(isinstance(each, BlockCacheCallback) for each in trainer.callbacks):
            trainer.callbacks.append(BlockCacheCallback())

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch, which a schedule does in one. Autocast is on in each stage's forward alone.

        Lightning zeroes the gradients between this and `backward`, so they are set aside until then.
        """
        self.pipeline.accumulated = self.lightning_module.trainer.accumulate_grad_batches
        loss = self.lightning_module.training_step(*args, **kwargs)
        self.aside = [(parameter, parameter.grad) for parameter in self.lightning_module.parameters()]
        return loss.requires_grad_()  # a leaf: its backward does nothing

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Put the gradients back."""
        for parameter, grad in self.aside:
            parameter.grad = grad

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, with gradients that all replicas agree on, and none left for the next batch."""

        def synchronized() -> Any:
            result = closure()
            self._synchronize()
            return result

        result = super().optimizer_step(optimizer, synchronized, *args, **kwargs)
        optimizer.zero_grad()
        return result

    def _synchronize(self) -> None:
        """Gradients: summed over the ranks that share a parameter, averaged over the replicas."""
        residual = self.lightning_module.model.residual
        for name, shape in self.shapes.items():
            owner, _, last = name.rpartition(".")
            parameter = residual.get_submodule(owner)._parameters[last]
            here = parameter is not None and parameter.grad is not None
            grad = parameter.grad if here else torch.zeros(shape, device=self.root_device)
            dist.all_reduce(grad, group=self.device_mesh["pipeline"].get_group())
            if parameter is not None:
                parameter.grad = grad
        replicas = self.device_mesh["data_parallel"]
        if replicas.size() > 1:
            grads = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
            waiting = [
                dist.all_reduce(grad.div_(replicas.size()), group=replicas.get_group(), async_op=True)
                for grad in grads
                if not isinstance(grad, DTensor)  # FSDP has averaged these
            ]
            for work in waiting:
                work.wait()

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all stages, on every rank."""
        group = self.device_mesh["pipeline"].get_group()
        others = {name for name, first in self.shared.items() if first != dist.get_rank(group)}
        names = {parameter: name for name, parameter in self.lightning_module.model.residual.named_parameters()}
        return total_norm(parameters, group, counted=lambda parameter: names.get(parameter) not in others)


class BlockCacheCallback(Callback):
    """Minds the block caches of a pipeline, and logs what they save.

    Opens the cache of this rank before a batch. After it, an entry that has outlived its microbatch is an error. Clears
    the cache after evaluation and after an exception.

    Logs, for the batch of a step and all processes together: `pipeline/bytes_sent`, forward and backward;
    `pipeline/bytes_saved`, what sending all Sources would add to it; and `pipeline/peak_cached_bytes`, the most that
    one rank held at a time.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the cache."""
        pipeline_of(trainer).bytes_sent = 0
        cache_of(trainer).open()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close it, and log."""
        cache, pipeline = cache_of(trainer), pipeline_of(trainer)
        cache.close()
        sent, all_sources = pipeline.bytes_sent, pipeline.bytes_without_cache(batch[:, 1:].shape)
        for name, value in {"bytes_sent": sent, "bytes_saved": all_sources - sent}.items():
            pl_module.log(f"pipeline/{name}", float(value), sync_dist=True, reduce_fx="sum")
        pl_module.log("pipeline/peak_cached_bytes", float(cache.peak_bytes), sync_dist=True, reduce_fx="max")

    def _open(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        cache_of(trainer).open()

    def _close(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        cache_of(trainer).close()

    def _clear(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        cache_of(trainer).clear()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _open
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _close
    on_validation_end = on_test_end = on_predict_end = on_exception = _clear


def cache_of(trainer: Trainer) -> BlockCache:
    """The cache of this rank."""
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy.cache


def pipeline_of(trainer: Trainer) -> Pipeline:
    """The pipeline that this rank is part of."""
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert trainer.strategy.pipeline is not None
    return trainer.strategy.pipeline
