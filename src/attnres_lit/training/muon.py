"""Muon for some parameters and AdamW for the rest, as the one optimizer that Lightning steps, saves and schedules."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer


class WholeMuon(Muon):
    """torch's Muon, which takes whole matrices; sharded ones are gathered, one at a time.

    Every rank orthogonalises the whole update and keeps its shard: the result is bit for bit that of one process with
    the same gradients, where products of shards would sum in another order. A step gathers a matrix, its gradient and
    its momentum.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Take one step. All ranks that share a matrix call it."""
        assert closure is None, "the gradients are there"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        sharded = isinstance(parameter, DTensor)
        whole = nn.Parameter(parameter.full_tensor()) if sharded else parameter
        whole.grad = parameter.grad.full_tensor() if sharded else parameter.grad  # pyrefly: ignore
        one = Muon([{**group, "params": [whole]}])
        state = self.state[parameter]
        one.state[whole] = {key: value.full_tensor() if sharded else value for key, value in state.items()}
        one.step()
        updated = {"": whole.detach(), **one.state[whole]}
        if sharded:
            layout = (parameter.device_mesh, parameter.placements)
            # every rank has the whole: nothing is sent
            updated = {key: distribute_tensor(value, *layout, src_data_rank=None) for key, value in updated.items()}
            parameter.copy_(updated[""])
        del updated[""]
        state.update(updated)


class MuonAdamW(Optimizer):
    """Two optimizers over disjoint parameters, with the groups and the state of both.

    Args:
        muon: of matrices.
        adamw: of everything else.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.parts = (muon, adamw)
        self.sizes = [len(part.param_groups) for part in self.parts]
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Take one step, and return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)
        for part, size in zip(self.parts, self.sizes, strict=True):
            # a restored state dict has put new groups and a new state in place
            part.param_groups, part.state = list(islice(groups, size)), self.state
            part.step()
        return loss
