"""Ways to spread one small model over processes, with optimizer steps that are the same in all of them."""

import zlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from attnres_lit import BlockAttnRes, Transformer
from attnres_lit.parallel.checkpoint import read_full, read_optimizers, read_weights, write, write_file
from attnres_lit.parallel.optimizer_state import add_names, group_names
from attnres_lit.training.muon import MuonAdamW, WholeMuon
from attnres_lit.training.optim import restore_by_name
from training.tiny import tiny_config

SIZES = {"one": 1, "fsdp": 2, "pipeline": 2, "replicated": 4, "hybrid": 4}  # processes of each layout
STAGES = [(0,), (1,), (2,), (3,)]  # sites of the stages: two on each of two ranks, not next to each other


class Whole(nn.Module):
    """The model under the names it has in a LightningModule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer(tiny_config(), partial(BlockAttnRes, num_blocks=2))


def cut(model, rank, size):
    """Keep what one rank of a pipeline holds."""
    keep = {site for stage in STAGES[rank::size] for site in stage}
    for site in set(range(4)) - keep:
        del model.sublayers[str(site)]
        for table in (model.residual.query, model.residual.key_gain):
            if str(site) in table:  # the first site has none
                del table[str(site)]
    if rank != 0:
        del model.embedding
    if rank != size - 1:
        del model.norm, model.head, model.residual.exit_query, model.residual.exit_key_gain


def shard(model, mesh):
    for sublayer in model.sublayers.values():
        fully_shard(sublayer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def spread(layout, muon=False):
    """What this process holds in a layout: the model and its optimizer, AdamW or Muon and AdamW."""
    whole = Whole()
    if layout in ("replicated", "hybrid"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        cut(whole.model, mesh["pipeline"].get_local_rank(), 2)
        if layout == "hybrid":
            shard(whole.model, mesh["data"])
    elif layout == "pipeline":
        cut(whole.model, dist.get_rank(), 2)
    elif layout == "fsdp":
        shard(whole.model, init_device_mesh("cpu", (2,)))
    if muon:
        matrices = [p for p in whole.model.sublayers.parameters() if p.dim() > 1]
        others = [p for p in whole.parameters() if not any(p is matrix for matrix in matrices)]
        return whole, MuonAdamW(WholeMuon([{"params": matrices}], lr=1e-2), torch.optim.AdamW([{"params": others}]))
    decayed = [p for p in whole.parameters() if p.dim() > 1]
    rest = [p for p in whole.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return whole, torch.optim.AdamW(groups, lr=1e-2)


def step(model, optimizer, number):
    """One step of the optimizer, with gradients that depend on nothing but the name and the number."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    optimizer.step()


def held(model, optimizer):
    """Everything that this process holds, by key, in full."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = dict(model.state_dict()) | {
        f"{names[p]}.{key}": value for p, state in optimizer.state.items() for key, value in state.items()
    }
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}
    settings = {
        f"{names[p]}.settings": (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return {key: value.detach().clone() for key, value in full.items()} | settings


def rest(steps):
    """Of Lightning's checkpoint."""
    return {"pytorch-lightning_version": "2.6", "global_step": steps, "hyper_parameters": {"a": [1, None]}}


def save(layout, path, steps=3, muon=False):
    """Take some steps, write, take one more. Returns what this process holds before and after the last one."""
    model, optimizer = spread(layout, muon)
    for number in range(steps):
        step(model, optimizer, number)
    before = held(model, optimizer)
    if layout == "one":
        state = optimizer.state_dict()
        add_names(state, group_names(optimizer, model))
        write_file(path, rest(steps) | {"state_dict": model.state_dict(), "optimizer_states": [state]})
    else:
        write(path, model, [optimizer], rest(steps))
    step(model, optimizer, steps)
    return before, held(model, optimizer)


def load(layout, paths, steps=3, muon=False):
    """Load each of the paths into a fresh model and optimizer, and take a step. Returns what `save` does, for each."""
    results = []
    for path in paths:
        model, optimizer = spread(layout, muon)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        if layout == "one":
            checkpoint = read_full(path)
            assert checkpoint["global_step"] == steps
            model.load_state_dict(checkpoint["state_dict"])
            restore_by_name(optimizer, model)
            optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        else:
            read_weights(path, model.state_dict())
            read_optimizers(path, model, [optimizer])
        before = held(model, optimizer)
        step(model, optimizer, steps)
        results.append((before, held(model, optimizer)))
    return results
