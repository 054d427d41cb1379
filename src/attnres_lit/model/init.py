"""All initial values of the network, in one place and the same for every residual strategy.

| parameter                       | initial value                                                                  |
|---------------------------------|--------------------------------------------------------------------------------|
| embedding                       | N(0, 1): a source as large as what the norms make of it                        |
| q, k, v, gate, up projections   | N(0, 1 / sqrt(fan-in))                                                         |
| o_proj, down_proj (the outputs) | N(0, 1 / sqrt(fan-in) / sqrt(2 num_layers)), so that their sum keeps its size  |
| head                            | N(0, 0.02): the first loss is that of a uniform guess                          |
| gains of all norms              | 1                                                                              |
| everything under `residual.`    | the strategy's own `reset_parameters`, called last                             |

With tied embeddings the shared matrix starts as the head does.
"""

import math

from torch import nn

from attnres_lit.model.attention import Rotary
from attnres_lit.residual.base import Residual


def initialize(model: nn.Module, num_sites: int) -> None:
    """Set every parameter and table of `model` to its initial value; works on what was just materialised from meta.

    Args:
        model: the Transformer, or the part of it that lives here.
        num_sites: sublayers of the whole model.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.Linear):
            std = 0.02 if name == "head" else module.in_features**-0.5
            is_output = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=std / math.sqrt(num_sites) if is_output else std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary | Residual):
            module.reset_parameters()
