"""A checkpoint as a model that can be used, and the tokenizer it was trained with. Needs no Lightning."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnres_lit.data.tokenizers import Tokenizer, unpack
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.init import materialize
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
        path: a checkpoint that `fit` wrote.
        device: where the model shall be.

    Raises:
        ValueError: there is no such file, it is damaged, or it is something else; it holds no tokenizer; the residual
            strategy or the tokenizer of the run cannot be imported.
    """
    checkpoint = read(path)
    model = model_of(checkpoint, path)
    data = checkpoint.get("TokenDataModule", {})
    if "tokenizer" not in data:
        raise ValueError(
            f"{path} holds no tokenizer: it was trained on other data than TokenDataModule's, or with an older version "
            "of this package, whose runs write it when they are continued with fit --ckpt_path"
        )
    return Trained(model.to(device), unpack(data["tokenizer"]), data["seq_len"], checkpoint.get("global_step", 0))


def model_of(checkpoint: Mapping[str, Any], path: str | Path) -> Transformer:
    """The model of a checkpoint that has been read from `path`, in eval mode, on the CPU. Raises as `load`."""
    hparams = checkpoint.get("hyper_parameters", {})
    if not {"config", "residual"} <= hparams.keys():
        raise ValueError(f"{path} does not say which model it is of: it was not written by fit")
    config = TransformerConfig(**hparams["config"])
    with torch.device("meta"):
        model = Transformer(config, strategy(hparams["residual"]), hparams.get("fp32_residual", False))
    weights = {key.removeprefix("model."): value for key, value in checkpoint["state_dict"].items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit its hyper-parameters: {error}") from None
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    materialize(model)  # the tables of the rotary embedding
    return model.eval()


def read(path: str | Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors mapped from the file. Raises ValueError as `load`."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever it holds, it is not ours
        raise ValueError(f"{path} is not a checkpoint, or it is damaged") from error
    if not isinstance(found, dict) or "state_dict" not in found:
        raise ValueError(f"{path} is not a checkpoint of Lightning")
    return found


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
