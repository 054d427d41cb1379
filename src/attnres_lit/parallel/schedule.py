"""Batches through the stages of a pipeline, on torch.distributed.pipelining."""

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from attnres_lit.model.loss import Reduction, next_token_nats
from attnres_lit.model.runner import Part
from attnres_lit.parallel.stage import Stage


class Pipeline:
    """The stages of this rank, and the schedule that drives them: a `Runner`.

    Args:
        stages: of this rank, in order.
        schedule: its name in torch.distributed.pipelining.
        num_microbatches: M, into which every batch is split.
        device: of this rank.
        group: the ranks of the pipeline, in order.
    """

    def __init__(
        self,
        stages: list[Stage],
        schedule: str,
        num_microbatches: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.stages = stages
        self.schedule = get_schedule_class(schedule)
        self.num_microbatches = num_microbatches
        self.device = device
        self.group = group
        self.accumulated = 1  # batches whose mean one optimizer step takes
        self.sent: Counter[tuple[int, int]] = Counter()  # bytes from stage to stage, by this rank, until cleared
        self._driver = lru_cache(2)(self._build)  # the shapes of training and of validation

    def run(self, tokens: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        """Nats of a batch, the same on every rank of the pipeline. Where gradients are enabled, theirs are added up.

        Args:
            tokens: int64 `(B, T)`.
            targets: int64 `(B, T)`.
            reduction: as in `next_token_nats`; "mean" where gradients are enabled.

        Raises:
            ValueError: the microbatches do not divide the batch.
        """
        batch, count = len(tokens), self.num_microbatches
        if batch % count:
            raise ValueError(f"num_microbatches={count} must divide the batch, {batch} sequences")
        train = torch.is_grad_enabled()
        assert reduction == "mean" or not train
        driver = self._driver(Size((batch // count, tokens.shape[1])))
        losses: list[Tensor] = []
        (driver.step if train else driver.eval)(
            *((tokens,) if self.stages[0].is_first else ()),
            microbatch=torch.arange(count),
            target=targets if self.stages[-1].is_last else None,
            losses=losses,
            return_outputs=False,
        )
        result = torch.empty(targets.shape if reduction == "none" else (), dtype=torch.float32, device=self.device)
        if self.stages[-1].is_last:
            if train:  # the sum of what was differentiated
                result = torch.stack(losses).detach().sum() * self.accumulated
            else:
                nats = torch.cat(losses)
                result = nats if reduction == "none" else getattr(nats, reduction)()
        dist.broadcast(result, group=self.group, group_src=dist.get_world_size(self.group) - 1)
        return result

    @property
    def parts(self) -> list[Part]:
        """The residuals of the stages of this rank."""
        return [stage.part for stage in self.stages]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of its pipeline."""
        return dist.get_rank(self.group) == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline, in order."""
        values = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def bytes_without_cache(self, batch: Size) -> int:
        """What this rank would send for a batch `(B, T)`, forward and backward, if boundaries carried all Sources."""
        return 2 * batch.numel() * sum(stage.bytes_without_cache for stage in self.stages)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share that a microbatch has in the mean; without gradients, the nats of its tokens."""
        if not torch.is_grad_enabled():
            return next_token_nats(logits, targets, "none")
        return next_token_nats(logits, targets, "mean") / (self.num_microbatches * self.accumulated)

    def _build(self, shape: Size) -> Any:
        """The schedule for microbatches of `shape` `(B, T)`, whose buffers it holds."""
        stages = [self._stage(stage, shape) for stage in self.stages]
        only = issubclass(self.schedule, PipelineScheduleSingle)
        return self.schedule(
            stages[0] if only else stages,
            n_microbatches=self.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # it would scale what earlier batches of an accumulation left, too
        )

    def _stage(self, stage: Stage, shape: Size) -> "CountedStage":
        """With the shapes of what crosses its boundaries: left to find them out, torch would run the model for it."""
        options = {"dtype": stage.dtype, "device": "meta", "requires_grad": True}

        def example(numbers: tuple[int, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.empty(shape + stage.layout.depth.shapes[number], **options) for number in numbers)

        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        logits = torch.empty(*shape, stage.model.config.vocab_size, **options)
        return CountedStage(
            stage,
            stage.index,
            stage.layout.num_stages,
            self.device,
            input_args=(tokens,) if stage.is_first else example(stage.traffic.received),
            output_args=(logits,) if stage.is_last else example(stage.traffic.sent),
            group=self.group,
            pipeline=self,
        )


class CountedStage(PipelineStage):
    """A PipelineStage that counts the bytes it sends."""

    def __init__(self, *args: Any, pipeline: Pipeline, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline = pipeline

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As PipelineStage's."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As PipelineStage's."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1)

    def _counted(self, ops: list[dist.P2POp], to: int) -> list[dist.P2POp]:
        self.pipeline.sent[self.stage_index, to] += sum(op.tensor.nbytes for op in ops)
        return ops
