"""The optimizer and its schedule: AdamW, or Muon for matrices; a linear warmup, then cosine or WSD."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from attnres_lit.model import Transformer
from attnres_lit.parallel.optimizer_state import group_names
from attnres_lit.parallel.storage import numbers
from attnres_lit.training.muon import MuonAdamW, WholeMuon

Name = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd"]
AdjustLR = Literal["original", "match_rms_adamw", "spectral_unclamped"]


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer, and a learning-rate schedule of a length of its own.

    The schedule counts optimizer steps: a run that is stopped early, or resumed for longer, keeps the same curve.

    Args:
        optimizer: "adamw", or "muon" (torch.optim.Muon) for the matrices of the sublayers and AdamW for the rest:
            embedding, head, norms and all that belongs to the residual.
        lr: highest learning rate.
        residual_lr: that of the depth parameters, which are new where the rest is pretrained; null: `lr`.
        momentum: of Muon.
        ns_steps: Newton-Schulz iterations of Muon.
        adjust_lr_fn: how Muon scales its update by the shape of a matrix. Under "match_rms_adamw" it is as large as
            AdamW's, so that one `lr` and `weight_decay` serve both; see torch.optim.Muon.
        betas: decay rates of AdamW's two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, of the decayed parameters only (see `parameter_groups`).
        schedule: "cosine" falls over the whole rest of the schedule; "wsd" stays at `lr` and falls linearly at the end.
        warmup_steps: steps of the linear rise; the first step already has `lr / warmup_steps`.
        total_steps: length of the schedule; later steps keep the final learning rate.
        decay_steps: length of the final fall of "wsd"; null: a fifth of total_steps.
        final_lr: learning rate at the end, as a fraction of `lr`.

    Raises:
        ValueError: a value out of range, or `decay_steps` given to a cosine schedule.
    """

    optimizer: Name = "adamw"
    lr: float = 3e-3
    residual_lr: float | None = None
    momentum: float = 0.95
    ns_steps: int = 5
    adjust_lr_fn: AdjustLR = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: Schedule = "cosine"
    warmup_steps: int = 50
    total_steps: int = 500
    decay_steps: int | None = None
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        in_range = {
            "optimizer": (self.optimizer in get_args(Name), f"one of {', '.join(get_args(Name))}"),
            "momentum": (0 <= self.momentum < 1, "from 0 to below 1"),
            "ns_steps": (1 <= self.ns_steps < 100, "from 1 to 99"),
            "adjust_lr_fn": (self.adjust_lr_fn in get_args(AdjustLR), f"one of {', '.join(get_args(AdjustLR))}"),
            "lr": (self.lr > 0, "above 0"),
            "residual_lr": (self.residual_lr is None or self.residual_lr > 0, "above 0, or null"),
            "betas": (
                len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
                "two numbers from 0 to below 1",
            ),
            "eps": (self.eps > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "schedule": (self.schedule in get_args(Schedule), f"one of {', '.join(get_args(Schedule))}"),
            "final_lr": (0 <= self.final_lr <= 1, "a fraction of lr, from 0 to 1"),
            "warmup_steps": (self.warmup_steps >= 0, "at least 0"),
            "total_steps": (self.total_steps >= 1, "at least 1"),
        }
        for name, (valid, meaning) in in_range.items():
            if not valid:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be {meaning}")
        if self.schedule == "cosine" and self.decay_steps is not None:
            raise ValueError(f"optim.decay_steps={self.decay_steps} belongs to schedule=wsd: set it to null for cosine")
        if not 0 < self.fall <= self.total_steps - self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and a decay of {self.fall} steps do not fit into "
                f"optim.total_steps={self.total_steps}"
            )

    @property
    def fall(self) -> int:
        """Steps from the start of the final fall to `total_steps`."""
        if self.schedule == "cosine":
            return self.total_steps - self.warmup_steps
        return math.ceil(self.total_steps / 5) if self.decay_steps is None else self.decay_steps

    def factor(self, step: int) -> float:
        """Learning rate of a step, counted from 0, as a fraction of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(max(0.0, 1 - (self.total_steps - step) / self.fall), 1.0)
        left = (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1 - progress
        return self.final_lr + (1 - self.final_lr) * left

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Of every parameter group: Muon's if there is one, then AdamW's with and without weight decay."""
        lrs = [self.lr] if self.residual_lr is None else [self.lr, self.residual_lr]
        adamw = [
            {"lr": lr, "betas": self.betas, "eps": self.eps, "weight_decay": weight_decay}
            for weight_decay in (self.weight_decay, 0.0)
            for lr in lrs
        ]
        if self.optimizer == "adamw":
            return adamw
        muon = {key: getattr(self, key) for key in ("lr", "weight_decay", "momentum", "ns_steps", "adjust_lr_fn")}
        return [muon, *adamw]

    def build(self, model: Transformer, fused: bool) -> tuple[Optimizer, LambdaLR]:
        """The optimizer of a model, and the schedule, to be stepped after every optimizer step."""
        groups = parameter_groups(model, self.weight_decay)
        if self.residual_lr is not None:
            groups = set_apart(groups, set(model.residual.parameters()))
        if self.optimizer == "muon":
            decay, matrices = set_apart(groups[:1], {p for p in model.sublayers.parameters() if p.dim() == 2})
            groups = [matrices, decay, *groups[1:]]
        groups = [{**group, **settings} for group, settings in zip(groups, self.settings, strict=True)]
        if self.optimizer == "muon":
            optimizer = MuonAdamW(WholeMuon(groups[:1]), AdamW(groups[1:], fused=fused))
        else:
            optimizer = AdamW(groups, fused=fused)
        return optimizer, LambdaLR(optimizer, self.factor)

    def apply(self, optimizer: Optimizer, scheduler: LambdaLR) -> None:
        """Give an optimizer restored from a checkpoint the values of this config; its moments and step count stay."""
        factor = self.factor(scheduler.last_epoch)
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update(settings, lr=settings["lr"] * factor, initial_lr=settings["lr"])
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def restore_by_name(optimizer: Optimizer, model: nn.Module) -> None:
    """Have an optimizer take the state of every parameter by its name, where a checkpoint has names, not by its place.

    Processes that each hold a part of a model write its parameters in another order than one that holds all of it.
    """

    def reorder(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        saved, own = numbers(state["param_groups"]), group_names(optimizer, model)
        if len(own) != len(state["param_groups"]):
            raise ValueError(
                f"the checkpoint's optimizer has {len(state['param_groups'])} parameter groups, this run's has "
                f"{len(own)}: set optim.optimizer and optim.residual_lr as they were, or start a new run from its "
                "weights with model.init_from"
            )
        if saved.keys() != set(chain.from_iterable(own)):
            return state  # without names it is in this order; with others, torch refuses it
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": [saved[n] for n in names]}
            for group, names in zip(state["param_groups"], own, strict=True)
        ]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(reorder)


def parameter_groups(model: Transformer, weight_decay: float) -> list[dict[str, Any]]:
    """All parameters of a model, or of what a pipeline stage keeps of it, in two groups, the decayed one first.

    Decayed are the matrices of the sublayers and the head, and what the residual declares in `decayed_parameters`. Not
    decayed are the embedding (also where the head shares it), all norms, and the rest of the residual.
    """
    residual = set(model.residual.parameters())
    embedding: set[nn.Parameter] = set() if model.embedding is None else set(model.embedding.parameters())
    matrices = {p for p in model.parameters() if p.dim() > 1} - residual - embedding
    declared = set(model.residual.decayed_parameters())
    assert declared <= residual, "a residual may declare only parameters of its own"
    decayed = matrices | declared
    decay = [p for p in model.parameters() if p in decayed]
    no_decay = [p for p in model.parameters() if p not in decayed]
    assert len(decay) + len(no_decay) == len({*decay, *no_decay}) == len(set(model.parameters())), "not a partition"
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def set_apart(groups: list[dict[str, Any]], chosen: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Every group as two, the second with those of its parameters that are chosen."""
    return [
        {**group, "params": [p for p in group["params"] if (p in chosen) == own]}
        for group in groups
        for own in (False, True)
    ]
