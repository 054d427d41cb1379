"""Fully sharded data parallelism (FSDP2): every process keeps a part of each parameter, and gathers a layer to run it.

A layer is one unit; so are the embedding, and the final norm with the head. What is left, everything under `residual.`,
belongs to the root: it is small, is used from the first site to the last, stays gathered from the forward pass to the
end of backward, and stays in fp32, so that a strategy reads plain fp32 parameters whatever the sublayers compute in.

Three wrappers meet here, in this order: activation checkpointing, which the model does at run time
(`model/recompute.py`) and which therefore wraps nothing; compilation of each sublayer, in place; sharding.
"""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from attnres_lit.model import Transformer
from attnres_lit.model.init import materialize


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    root: nn.Module | None = None,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    compile: bool = False,
) -> None:
    """Shard a model in place over the ranks of a data-parallel mesh.

    What is still on meta gets its initial values on the CPU, one unit after the other, so that no process ever holds
    more than one whole unit beside its shards. What has values keeps them; they must be the same on every rank.

    Args:
        model: the Transformer, or what a pipeline stage keeps of it: sublayers may be missing, and embedding, norm or
            head be None.
        mesh: one dimension, or two to replicate over the first and shard over the second.
        root: the module that is called, if it is not `model` but one around it.
        param_dtype: what the layers are gathered in for forward and backward, under mixed precision, the gains of their
            norms included; gradients are reduced in fp32. None: the dtype of the parameters.
        reshard_after_forward: let go of a layer between forward and backward. False costs the memory of all layers and
            saves gathering each a second time, for every microbatch of a pipeline.
        compile: compile the sublayers.

    Raises:
        ValueError: a parameter has no axes.
    """
    if scalars := [name for name, parameter in model.named_parameters() if parameter.dim() == 0]:
        raise ValueError(f"FSDP2 shards no parameter without axes: give {scalars[0]} the shape (1,)")
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False) if param_dtype else exact
    if compile:
        model.compile_sublayers()
    for names in units(model):
        materialize(model, *names)
        modules = [model.get_submodule(name) for name in names]
        # the embedding is the first source, and has the dtype that all sources are kept in
        policy = exact if model.fp32_residual and "embedding" in names else mixed
        fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    materialize(model)
    # backward may read again for a sublayer (`checkpoint_activations`), so the depth parameters stay gathered
    fully_shard(root or model, mesh=mesh, mp_policy=exact, reshard_after_forward=False)


def units(model: Transformer) -> Iterator[list[str]]:
    """The names of the modules that are gathered together, of those that are there."""
    tied = model.config.tie_embeddings and model.embedding is not None and model.head is not None
    ends = [["embedding", "norm", "head"]] if tied else [["embedding"], ["norm", "head"]]
    layers = groupby(model.sublayers, lambda key: int(key) // 2)
    for names in (*([f"sublayers.{key}" for key in keys] for _, keys in layers), *ends):
        if there := [name for name in names if getattr(model, name, model) is not None]:
            yield there
