"""Does a checkpoint fit: to resume from, in its architecture; to start a new run from, in its weights."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from attnres_lit.model import Transformer
from attnres_lit.parallel.checkpoint import describe, held_elsewhere, read_weights
from attnres_lit.parallel.storage import Stored
from attnres_lit.parallel.together import together

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
    """Load the weights of a checkpoint; those of the residual too if it is the same strategy. All processes call it.

    Args:
        model: what receives the weights; the part of it that this process holds.
        path: a checkpoint of this package, of any layout.
        asked: the hyper-parameters of this run.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged; its weights do not fit.
    """
    same_strategy = together(lambda: check_warm_start(model, path, asked))
    weights = {
        f"model.{name}": weight
        for name, weight in model.state_dict().items()
        if same_strategy or not name.startswith("residual.")
    }
    read_weights(path, weights)
    rest = "" if same_strategy else f"; {architecture(asked)['model.residual']} starts fresh"
    rank_zero_info(f"Starting from the weights of {path}, at step 0{rest}.")


def check_warm_start(model: Transformer, path: str, asked: Mapping[str, Any]) -> bool:
    """Raise what `warm_start` raises; the model stays as it is. All processes call it.

    Returns:
        Whether the weights of the residual are loaded too.
    """
    target = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    elsewhere = held_elsewhere(target)
    try:
        checkpoint = describe(path)
    except ValueError as error:
        raise ValueError(f"model.init_from: {error}") from error
    stored = checkpoint.get("hyper_parameters", {})
    old, new = (architecture(each) if "residual" in each else {} for each in (stored, asked))
    same_strategy = old.get("model.residual") == new["model.residual"]
    weights, target = (
        {
            name.removeprefix("model."): weight
            for name, weight in each.items()
            if name not in elsewhere and (same_strategy or not name.startswith("model.residual."))
        }
        for each in (checkpoint["state_dict"], target)
    )
    found = misfits(weights, target)
    # the number of heads is not in the shape of any weight, nor is it whether two weights are one
    heads = "model.config.num_heads"
    if heads in old and old[heads] != new[heads]:
        found = f"{heads}={old[heads]}, this run has {new[heads]}"
    if model.config.tie_embeddings and not found:
        names = ("model.head.weight", "model.embedding.weight")
        ends = {f"state_dict.{name}": torch.empty_like(checkpoint["state_dict"][name], device="cpu") for name in names}
        Stored(path).fill(ends)
        if not torch.equal(*ends.values()):
            found = "its head is not its embedding, and this run ties them"
    if found:
        raise ValueError(f"model.init_from: {path} does not fit: {found}")
    return same_strategy


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
