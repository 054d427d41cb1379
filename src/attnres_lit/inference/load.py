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
    tokenizer: Tokenizer | None  # None: the checkpoint was not trained on text of this package
    step: int  # optimizer steps behind it


def load(path: str | Path, device: str | torch.device = "cpu") -> Trained:
    """Read a checkpoint.

    Args:
        path: a checkpoint that `fit` wrote.
        device: where the model shall be.

    Raises:
        ValueError: there is no such file, it is damaged, or it is something else; the residual strategy or the
            tokenizer of the run cannot be imported.
    """
    checkpoint = read(path)
    hparams = checkpoint.get("hyper_parameters", {})
    if not {"config", "residual"} <= hparams.keys():
        raise ValueError(f"{path} does not say which model it is of: it was not written by fit")
    config = TransformerConfig(**hparams["config"])
    options = {"fp32_residual": hparams.get("fp32_residual", False)}
    with torch.device("meta"):
        model = Transformer(config, strategy(hparams["residual"]), **options)
    weights = {key.removeprefix("model."): value for key, value in checkpoint["state_dict"].items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit its hyper-parameters: {error}") from None
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    materialize(model)  # the tables of the rotary embedding
    packed = checkpoint.get("TokenDataModule", {}).get("tokenizer")
    return Trained(model.to(device).eval(), unpack(packed) if packed else None, checkpoint.get("global_step", 0))


def load_with_tokenizer(path: str | Path, device: str | torch.device = "cpu") -> tuple[Transformer, Tokenizer]:
    """As `load`, for use on text. Raises ValueError, too, where the checkpoint has no tokenizer."""
    model, tokenizer, _ = load(path, device)
    if tokenizer is None:
        raise ValueError(f"{path} holds no tokenizer: let its run write a checkpoint again, with fit --ckpt_path")
    return model, tokenizer


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
