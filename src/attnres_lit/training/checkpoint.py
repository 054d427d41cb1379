"""Does a checkpoint fit: to resume from, in its architecture; to start a new run from, in its weights."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from attnres_lit.model import Transformer

EXECUTION = {"two_phase"}  # options of a residual that change how a value is computed, not which


def check_resume(checkpoint: Mapping[str, Any], asked: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Compare a checkpoint with a module's hyper-parameters, if the checkpoint has any, and with its weights.

    An option that the checkpoint does not know, being older than it, is taken to have been as asked.

    Raises:
        ValueError: they differ; the message names every difference.
    """
    stored = checkpoint.get("hyper_parameters", {})
    described = "config" in stored and "residual" in stored
    old, new = (architecture(each) if described else {} for each in (stored, asked))
    differing = [name for name in new if name in old and old[name] != new[name]]
    if "model.residual" in differing:  # the options of two strategies do not compare
        differing = [name for name in differing if not name.startswith("model.residual.")]
    if differing:
        raise ValueError(
            "checkpoint was trained with "
            + "; ".join(f"{name}={old[name]}, this run asks for {new[name]}" for name in differing)
            + ": make them equal to resume, or start a new run from its weights with model.init_from"
        )
    if found := misfits(checkpoint.get("state_dict", {}), weights):
        without = "" if described else "has no hyper-parameters, and "
        raise ValueError(f"the checkpoint {without}its weights do not fit: {found}")


def architecture(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a resumed run must share, by the name they have on the command line."""
    residual = hparams["residual"]
    return {
        "model.residual": residual["class_path"],
        **{f"model.residual.{name}": value for name, value in residual["init_args"].items() if name not in EXECUTION},
        **{f"model.config.{name}": value for name, value in hparams["config"].items()},
        "model.fp32_residual": hparams.get("fp32_residual", False),
    }


def warm_start(model: Transformer, path: str, asked: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint; those of the residual too if it is the same strategy.

    Args:
        model: what receives the weights.
        path: a Lightning checkpoint of this package.
        asked: the hyper-parameters of this run.

    Raises:
        ValueError: the file is missing or is not a checkpoint; its weights do not fit.
    """
    weights, same_strategy = fitting_weights(model, path, asked)
    everywhere = StateDictOptions(full_state_dict=True, strict=False)  # also where the model is sharded
    set_model_state_dict(model, weights, options=everywhere)  # pyrefly: ignore[bad-argument-type]
    rest = "" if same_strategy else f"; {architecture(asked)['model.residual']} starts fresh"
    rank_zero_info(f"Starting from the weights of {path}, at step 0{rest}.")


def fitting_weights(model: Transformer, path: str, asked: Mapping[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """What `warm_start` loads, and whether that includes the residual; the model stays as it is. Raises as it does."""
    checkpoint = _read(path)
    weights = {key.removeprefix("model."): value for key, value in checkpoint["state_dict"].items()}
    stored = checkpoint.get("hyper_parameters", {})
    old, new = (architecture(each) if "residual" in each else {} for each in (stored, asked))
    target = model.state_dict()
    same_strategy = old.get("model.residual") == new["model.residual"]
    if not same_strategy:
        weights, target = (
            {key: value for key, value in each.items() if not key.startswith("residual.")} for each in (weights, target)
        )
    found = misfits(weights, target)
    # the number of heads is not in the shape of any weight, nor is it whether two weights are one
    heads = "model.config.num_heads"
    if heads in old and old[heads] != new[heads]:
        found = f"{heads}={old[heads]}, this run has {new[heads]}"
    if model.config.tie_embeddings and not found and not weights["head.weight"].equal(weights["embedding.weight"]):
        found = "its head is not its embedding, and this run ties them"
    if found:
        raise ValueError(f"init_from={path} does not fit: {found}")
    return weights, same_strategy


def misfits(weights: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> str:
    """What keeps weights from being loaded into a module, in one line; empty if nothing."""
    reasons = [
        ("missing", [key for key in target if key not in weights]),
        ("unknown", [key for key in weights if key not in target]),
        (
            "of another shape",
            [
                f"{key} {tuple(weights[key].shape)} for {tuple(target[key].shape)}"
                for key in target
                if key in weights and weights[key].shape != target[key].shape
            ],
        ),
    ]
    return "; ".join(f"{_some(names)} {reason}" for reason, names in reasons if names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"init_from={path}: there is no such file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"init_from={path}: damaged, or not a checkpoint that can be loaded safely") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"init_from={path}: not a Lightning checkpoint")
    return checkpoint
