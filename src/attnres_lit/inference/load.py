"""A checkpoint as a model that can be used, and the tokenizer it was trained with. Needs no Lightning."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnres_lit.data.tokenizers import Tokenizer, unpack
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.attention import Rotary
from attnres_lit.parallel.checkpoint import describe, read_weights
from attnres_lit.residual.base import Residual


class Trained(NamedTuple):
    """What a checkpoint of a run holds, but for its optimizer."""

    model: Transformer  # in eval mode
    tokenizer: Tokenizer
    seq_len: int  # tokens that it saw at a time in training
    step: int  # optimizer steps behind it


def load(path: str | Path, device: str | torch.device = "cpu") -> Trained:
    """Read a checkpoint.

    Args:
        path: a checkpoint that `fit` wrote, a file or a folder.
        device: where the model shall be.

    Raises:
        ValueError: there is no such file, it is damaged, or it is something else; it holds no tokenizer; the residual
            strategy or the tokenizer of the run cannot be imported.
    """
    found = describe(path)
    data, hparams = found.get("TokenDataModule", {}), found.get("hyper_parameters", {})
    if not {"config", "residual"} <= hparams.keys():
        raise ValueError(f"{path} does not say which model it is of: it was not written by fit")
    if "tokenizer" not in data:
        raise ValueError(
            f"{path} holds no tokenizer: it was trained on other data than TokenDataModule's, or with an older version "
            "of this package, whose runs write it when they are continued with fit --ckpt_path"
        )
    config = TransformerConfig(**hparams["config"])
    with torch.device("meta"):
        model = Transformer(config, strategy(hparams["residual"]), hparams.get("fp32_residual", False))
    for module in (model.embedding, model.sublayers, model.norm, model.head):  # the residual is on no meta device
        module.to_empty(device="cpu")
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    for module in model.modules():
        if isinstance(module, Rotary):  # its tables are in no checkpoint
            module.reset_parameters()
    read_weights(path, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    return Trained(model.to(device).eval(), unpack(data["tokenizer"]), data["seq_len"], found.get("global_step", 0))


def strategy(described: Mapping[str, Any]) -> partial[Residual]:
    """The residual factory of `{class_path, init_args}`. Raises ValueError where there is no such strategy."""
    module, _, name = described["class_path"].rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, Residual)):
        raise ValueError(f"the residual strategy {described['class_path']} of the checkpoint cannot be imported here")
    return partial(cls, **described.get("init_args", {}))
