"""All initial values of the network, in one place and the same for every residual strategy.

| parameter                       | initial value                                                                  |
|---------------------------------|--------------------------------------------------------------------------------|
| embedding                       | N(0, 1): a source as large as what the norms make of it                        |
| q, k, v, gate, up projections   | N(0, 1 / sqrt(fan-in))                                                         |
| o_proj, down_proj (the outputs) | N(0, 1 / sqrt(fan-in) / sqrt(2 num_layers)), so that their sum keeps its size  |
| head                            | N(0, 0.02): the first loss is that of a uniform guess                          |
| gains of all norms, all biases  | 1, 0                                                                           |
| everything under `residual.`    | the strategy's own `reset_parameters`, called last                             |

With tied embeddings the shared matrix starts as the head does.

Every module draws from a generator of its own, seeded by the base seed of the model and the module's name. The values
of a parameter therefore depend neither on the residual strategy nor on what else is built in this process: a model
built whole, on meta and then unit by unit, or in part as a pipeline stage, starts from the same numbers, bit for bit.
"""

import hashlib
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from attnres_lit.model.attention import Rotary
from attnres_lit.model.norm import RMSNorm
from attnres_lit.residual.base import Residual

if TYPE_CHECKING:
    from attnres_lit.model.transformer import Transformer


def draw_seed() -> int:
    """A base seed from torch's global generator, the same under `torch.device("meta")`."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def initialize(model: "Transformer") -> None:
    """Set every parameter and table of a whole model to its initial value; on meta, those of the residual alone.

    The numbers are drawn on the CPU, wherever the model lives.
    """
    device = next(model.parameters()).device
    if device.type == "meta":
        _initialize(model, "residual", model.residual)
        return
    model.to("cpu")
    for name, module in model.named_modules():
        _initialize(model, name, module)
    model.to(device)


def materialize(model: "Transformer", *parts: str) -> None:
    """Give what is on meta a place on the CPU and the initial values that it has in a whole model of the same seed.

    The model may have lost some of its sublayers, its embedding, norm or head; what is not on meta stays as it is. A
    pipeline stage is made by removing the sublayers of other stages before; the residual has its values from the start.

    Args:
        model: a Transformer built under `torch.device("meta")`.
        parts: names of modules in it, for example "residual" or "sublayers.3"; none: all there are. With tied
            embeddings the embedding and the head are one part: name both in a call.
    """
    chosen = {name: module for part in parts or ("",) for name, module in _named(model, part) if _is_on_meta(module)}
    placed: dict[torch.Tensor, torch.Tensor] = {}  # so that a tied matrix stays one
    for module in chosen.values():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fresh = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[key] = placed.setdefault(parameter, fresh)  # pyrefly: ignore
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    for name, module in chosen.items():
        # the parameter dicts of a residual are on meta one by one, and get their values from it all at once
        _initialize(model, name, module)


def _named(model: nn.Module, part: str) -> Generator[tuple[str, nn.Module]]:
    yield from model.get_submodule(part).named_modules(prefix=part)


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a tensor of its own is; of a residual, whether any is, since its values are set all at once."""
    of = module if isinstance(module, Residual) else None
    own = (*module.parameters(of is not None), *module.buffers(of is not None))
    return any(tensor.is_meta for tensor in own)


def _initialize(model: "Transformer", name: str, module: nn.Module) -> None:
    """Set the parameters of one module, on the CPU, which has the global name `name`."""
    with _draws(model.seed, name), torch.no_grad():
        if name.startswith("residual."):
            return  # set from `residual`
        if isinstance(module, Residual):
            for each in reversed(list(module.modules())):  # the strategy itself last
                reset = getattr(each, "reset_parameters", None)
                if callable(reset):
                    reset()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.Linear):
            std = 0.02 if name == "head" else module.in_features**-0.5
            is_output = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=std / math.sqrt(model.config.num_sites) if is_output else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm | Rotary):
            module.reset_parameters()


@contextmanager
def _draws(seed: int, name: str) -> Generator[None]:
    """Inside, the random numbers that belong to the module of this name."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
        yield
