"""Decoders of the Llama family as Hugging Face stores them: their sizes, their weights, and which part is which here.

A folder holds `config.json` and `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
Nothing else is read, so nothing is ever unpickled. PreNorm is the strategy of the pretrained models; under any other
that starts as PreNorm, the model computes the pretrained function until training moves its depth parameters.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from attnres_lit.model.config import TransformerConfig

OURS = "attnres_lit"  # the model_type of what this package exports
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # the others, by model_type; SmolLM is a llama
PRENORM = {"class_path": "attnres_lit.PreNorm", "init_args": {}}

# of a layer: their name, and ours within the sublayer of its attention (0) or MLP (1)
_OF_LAYER = {
    "input_layernorm": (0, "norm"),
    **{f"self_attn.{name}": (0, f"mixer.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"self_attn.{name}": (0, f"mixer.{name}") for name in ("q_norm", "k_norm")},
    "post_attention_layernorm": (1, "norm"),
    **{f"mlp.{name}": (1, f"mixer.{name}") for name in ("gate_proj", "up_proj", "down_proj")},
}
_OF_SUBLAYER = {ours: theirs for theirs, ours in _OF_LAYER.items()}
_OUTSIDE = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_OUTSIDE_BACK = {ours: theirs for theirs, ours in _OUTSIDE.items()}

# what would make a model another function than ours, and the value that does not
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder with a `config.json`, as these have."""
    return (Path(path) / "config.json").is_file()


def read_config(path: str | Path) -> tuple[TransformerConfig, dict[str, Any]]:
    """The sizes of a checkpoint, and its residual as `{class_path, init_args}`.

    `max_seq_len` stays within the window of models with sliding-window attention: up to there it is plain attention.

    Raises:
        ValueError: `config.json` is missing or damaged; the architecture is another one, or has a part that cannot be
            expressed, which is named.
    """
    file = Path(path) / "config.json"
    found = _json(file)
    kind = found.get("model_type")
    try:
        if kind == OURS:
            return TransformerConfig(**found["transformer"]), found["residual"]
        if kind not in FAMILIES:
            raise ValueError(f"model_type={kind} is not supported: known are {', '.join((*FAMILIES, OURS))}")
        return _config(found), PRENORM
    except KeyError as error:
        raise ValueError(f"{file} does not say {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def read_weights(path: str | Path, config: TransformerConfig) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names that they have in a `Transformer`.

    Args:
        path: the folder.
        config: its sizes, from `read_config`.

    Raises:
        ValueError: a file is missing or damaged, or holds a weight that has no place in the model.
    """
    folder = Path(path)
    weights: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is missing or damaged: {error}") from None
    ours = _json(folder / "config.json").get("model_type") == OURS
    named = {name.removeprefix("model.") if ours else name_here(name): tensor for name, tensor in weights.items()}
    named = {name: tensor for name, tensor in named.items() if not name.endswith("rotary_emb.inv_freq")}  # a table
    if config.tie_embeddings and "embedding.weight" in named:
        named["head.weight"] = named["embedding.weight"]
    return named


def name_here(name: str) -> str:
    """Their name of a weight to ours; one that has none stays as it is."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    of_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if of_layer and of_layer[2] in _OF_LAYER:
        site, part = _OF_LAYER[of_layer[2]]
        return f"sublayers.{2 * int(of_layer[1]) + site}.{part}.{kind}"
    return name


def name_there(name: str) -> str:
    """Our name of a weight to theirs. Raises KeyError for one that they do not have, such as a residual's."""
    module, _, kind = name.rpartition(".")
    of_sublayer = re.fullmatch(r"sublayers\.(\d+)\.(.+)", module)
    if of_sublayer:
        layer, site = divmod(int(of_sublayer[1]), 2)
        return f"model.layers.{layer}.{_OF_SUBLAYER[site, of_sublayer[2]]}.{kind}"
    return f"{_OUTSIDE_BACK[module]}.{kind}"


def follow(asked: Mapping[str, Any], stored: TransformerConfig, source: str) -> dict[str, Any]:
    """The sizes of a run that starts from a checkpoint: those of the checkpoint.

    Args:
        asked: the fields of a TransformerConfig; what has its default value counts as not asked for. `max_seq_len` may
            be lower than the checkpoint's.
        stored: of the checkpoint.
        source: what to call it.

    Raises:
        ValueError: something else was asked for; the message names every difference.
    """
    followed = {each.name: getattr(stored, each.name) for each in fields(stored) if each.name in asked}
    chosen = {
        each.name: asked[each.name]
        for each in fields(stored)
        if each.name in asked and each.name != "vocab_size" and asked[each.name] != each.default
    }
    if chosen.get("max_seq_len", stored.max_seq_len) <= stored.max_seq_len:
        followed["max_seq_len"] = chosen.pop("max_seq_len", stored.max_seq_len)
    differing = [name for name, value in chosen.items() if value != followed[name]]
    if differing:
        what = "; ".join(f"model.config.{name}={chosen[name]}, {source} has {followed[name]}" for name in differing)
        raise ValueError(f"{what}: leave it out, the checkpoint decides")
    return followed


def _config(found: Mapping[str, Any]) -> TransformerConfig:
    for name, plain in _PLAIN.items():
        if (value := found.get(name, plain[0])) not in plain:
            raise ValueError(f"{name}={value} cannot be expressed")
    for name in _SIZES:
        if not isinstance(value := found[name], int | float):
            raise ValueError(f"{name}={value} is not a number")
    kind, heads = found["model_type"], found["num_attention_heads"]
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", None) or found.get("rope_theta") or 10000.0
    head_dim = found.get("head_dim") or (128 if kind == "qwen3" else None)  # which is what its own code takes it to be
    longest = found["max_position_embeddings"]
    return TransformerConfig(
        vocab_size=found["vocab_size"],
        dim=found["hidden_size"],
        num_layers=found["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        hidden_dim=found["intermediate_size"],
        max_seq_len=min(longest, _window(found) or longest),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope, found),
        norm_eps=found["rms_norm_eps"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_embeddings=bool(found.get("tie_word_embeddings", False)),
    )


def _rope_scaling(rope: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor cannot be expressed")
    if kind == "default":
        return None
    if kind in ("llama3", "yarn"):
        trained = found.get("original_max_position_embeddings") or found["max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", trained)
    return {"rope_type": kind, **rope}


def _window(found: Mapping[str, Any]) -> int | None:
    """Tokens that a layer of sliding-window attention sees; None if there is no such layer."""
    kind = found["model_type"]
    if kind == "llama" or (kind != "mistral" and not found.get("use_sliding_window")):
        return None
    types = found.get("layer_types") or ()
    if types and "sliding_attention" not in types:
        return None
    return found.get("sliding_window")


def _files(folder: Path) -> Iterable[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not all(Path(str(name)).name == name for name in names.values()):
        raise ValueError(f"{index} is damaged: it names no files beside it")
    return [folder / name for name in sorted(set(names.values()))]


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no options")
    return found
