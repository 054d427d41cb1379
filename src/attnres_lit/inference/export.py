"""A trained model as a folder that `transformers` loads.

PreNorm is what the Llama family computes, so it becomes a model of that family (Llama; Qwen2 with biases, Qwen3 with
norms on queries and keys) and runs wherever those run. Any other strategy, or a model whose MLPs are not all as wide,
becomes a folder with `modeling_attnres_lit.py` beside the weights, which needs this package and
`trust_remote_code=True`.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnres_lit.data.tokenizer_json import tokenizer_files
from attnres_lit.data.tokenizers import Tokenizer
from attnres_lit.model import Transformer, TransformerConfig, huggingface
from attnres_lit.residual import PreNorm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODELING = "modeling_attnres_lit"


def export(
    model: Transformer,
    residual: Mapping[str, Any],
    tokenizer: Tokenizer,
    out: str | Path,
    dtype: str = "float32",
) -> None:
    """Write a model, its sizes and its tokenizer into a folder of its own, whole or not at all.

    Args:
        model: on any device.
        residual: its strategy as `{class_path, init_args}`, as a checkpoint has it.
        tokenizer: its tokenizer.
        out: the folder; it must not exist.
        dtype: of the weights: float32, in which nothing is lost, bfloat16 or float16.

    Raises:
        ValueError: `out` exists or cannot be written; an unknown dtype; a tokenizer of a class of a user's own.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} must be one of {', '.join(DTYPES)}")
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} is there already: choose another folder, or delete it")
    family = family_of(model.config) if type(model.residual) is PreNorm else None
    described = _ours(model.config, residual) if family is None else _theirs(model.config, family)
    described |= {"dtype": dtype, "torch_dtype": dtype, "bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eod)
    texts = {
        "config.json": json.dumps(described, indent=2),
        "generation_config.json": json.dumps(ends, indent=2),
        **tokenizer_files(tokenizer, model.config.max_seq_len),
    }
    weights = _weights(model, DTYPES[dtype], theirs=family is not None)
    beside = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)  # of an export that was killed
        beside.mkdir(parents=True)
        for name, text in texts.items():
            (beside / name).write_text(text + "\n", encoding="utf-8")
        if family is None:
            shutil.copy(Path(__file__).with_name(f"{MODELING}.py"), beside)
        save_file(weights, beside / "model.safetensors", metadata={"format": "pt"})
        (beside / "model.safetensors").chmod((beside / "config.json").stat().st_mode)  # safetensors keeps it private
        beside.rename(out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def family_of(config: TransformerConfig) -> str | None:
    """Which of the family computes what PreNorm does with these sizes; None if none of them has all of it."""
    if len(set(config.mlp_dims)) > 1:
        return None  # theirs are as wide in every layer
    if config.qkv_bias:
        return None if config.qk_norm else "Qwen2"
    if config.qk_norm:
        return "Qwen3"
    return "Llama" if config.dim % config.num_heads == 0 else "Mistral"  # a Llama's heads divide its width


def _weights(model: Transformer, dtype: torch.dtype, theirs: bool) -> dict[str, Tensor]:
    """Of the model, with the names that they have in the folder; a head that is the embedding is left out."""
    tied = model.config.tie_embeddings
    found = {name: value for name, value in model.state_dict().items() if name != "head.weight" or not tied}
    named = {huggingface.name_there(name) if theirs else f"model.{name}": value for name, value in found.items()}
    return {name: value.detach().to("cpu", dtype).contiguous() for name, value in named.items()}


def _theirs(config: TransformerConfig, family: str) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dims[0],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **({"sliding_window": None} if family == "Mistral" else {}),
    }


def _ours(config: TransformerConfig, residual: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["AttnResForCausalLM"],
        "model_type": huggingface.OURS,
        "auto_map": {
            "AutoConfig": f"{MODELING}.AttnResConfig",
            "AutoModelForCausalLM": f"{MODELING}.AttnResForCausalLM",
        },
        "vocab_size": config.vocab_size,
        "transformer": vars(config),
        "residual": dict(residual),
    }
