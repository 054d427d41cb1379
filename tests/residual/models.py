"""Tiny models around any strategy."""

from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import yaml

from attnres_lit.model import Transformer, TransformerConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "residual"
VOCAB, LAYERS = 31, 6


def factory_from_yaml(path):
    """What the command line makes of a file in configs/residual/."""
    spec = yaml.safe_load(path.read_text())
    module, _, name = spec["class_path"].rpartition(".")
    return partial(getattr(import_module(module), name), **spec.get("init_args", {}))


def build(residual, dtype=torch.float64, seed=0, **config):
    """A model of 6 layers in float64, with the norm_eps at which equalities are exact."""
    torch.manual_seed(seed)
    config = {"vocab_size": VOCAB, "dim": 16, "num_layers": LAYERS, "num_heads": 2, "norm_eps": 1e-18} | config
    return Transformer(TransformerConfig(**config), residual).to(dtype)


def scatter(model, std=0.3, seed=1):
    """Random values around the initial ones for every depth parameter, and sublayers that matter."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=gen, dtype=torch.float64).to(parameter.dtype)
            if "projection" in name and "residual" in name:
                parameter.add_(noise, alpha=1.0)
            elif "residual" in name:
                is_map = "query" in name and parameter.dim() > 1  # then what it makes is a query of this size
                parameter.add_(noise, alpha=std / parameter.shape[-1] ** 0.5 if is_map else std)
            elif parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def loss_of(logits):
    """A scalar that weighs every logit differently."""
    probe = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).sin().view_as(logits)
    return (logits.log_softmax(-1) * probe).sum()
