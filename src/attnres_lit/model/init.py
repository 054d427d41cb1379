"""All initial values of the network, in one place and the same for every residual strategy.

| parameter                       | initial value                                                     |
|---------------------------------|-------------------------------------------------------------------|
| embedding, head                 | N(0, 0.02)                                                        |
| q, k, v, gate, up projections   | N(0, 0.02)                                                        |
| o_proj, down_proj (the outputs) | N(0, 0.02 / sqrt(2 num_layers)), so that their sum keeps its size |
| gains of all norms              | 1                                                                 |
| everything under `residual.`    | the strategy's own `reset_parameters`, called last                |
"""

import math

from torch import nn

from attnres_lit.model.attention import Rotary
from attnres_lit.residual.base import Residual

STD = 0.02


def initialize(model: nn.Module, num_sites: int) -> None:
    """Set every parameter and table of `model` to its initial value; works on what was just materialised from meta.

    Args:
        model: the Transformer, or the part of it that lives here.
        num_sites: sublayers of the whole model.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_output = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=STD / math.sqrt(num_sites) if is_output else STD)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary | Residual):
            module.reset_parameters()
