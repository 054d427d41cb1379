"""Checkpoints of the Llama family: read as they are, under every residual, or refused by name.

The retrofit table of docs/inference.md: `pytest tests/model/test_huggingface.py -k table -s`.
"""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres_lit.model import Transformer, TransformerConfig, huggingface
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm, Residual
from attnres_lit.residual.attnres import AttnRes
from model.pretrained import FAMILIES, AutoModelForCausalLM, make, save, tokens

STRATEGIES = {
    "PreNorm": PreNorm,
    "DenseFormer": DenseFormer,
    "mHC": MHC,
    "Full AttnRes": FullAttnRes,
    "Block AttnRes": partial(BlockAttnRes, num_blocks=3),
}


def load(folder, residual):
    """The checkpoint under a strategy; what the strategy adds keeps its initial values."""
    config, _ = huggingface.read_config(folder)
    model = Transformer(config, residual).eval()
    left = model.load_state_dict(huggingface.read_weights(folder, config), strict=False)
    assert not left.unexpected_keys
    assert all(name.startswith("residual.") for name in left.missing_keys)
    return model


@torch.inference_mode()
def difference(model, theirs, ids=None):
    ids = tokens() if ids is None else ids
    return float((model(ids) - theirs(ids).logits).abs().max())


def test_the_retrofit_table(tmp_path):
    """Every family under every strategy computes what `transformers` does."""
    rows = {}
    for family in FAMILIES:
        theirs, folder = save(family, tmp_path / family)
        rows[family] = {name: difference(load(folder, each), theirs) for name, each in STRATEGIES.items()}
    print("\n| family | " + " | ".join(STRATEGIES) + " |\n|" + "---|" * (len(STRATEGIES) + 1))
    for family, row in rows.items():
        print(f"| {family} | " + " | ".join(f"{value:.0e}" for value in row.values()) + " |")
    assert all(value < 1e-4 for row in rows.values() for value in row.values()), rows


@pytest.mark.parametrize("family", ["Llama 2", "Qwen3"])
def test_in_float64_nothing_but_rounding_is_left(family, tmp_path):
    theirs, folder = save(family, tmp_path)
    theirs = theirs.double()  # but for their tables and norms, which stay fp32
    for residual in STRATEGIES.values():
        assert difference(load(folder, residual).double(), theirs) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_large_eps_needs_its_share_at_every_norm(strategy, tmp_path, monkeypatch):
    _, folder = save("SmolLM2", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert difference(load(folder, STRATEGIES[strategy]), theirs) < 1e-4
    for each in (Residual, AttnRes, MHC):
        monkeypatch.setattr(each, "read_scale", lambda self, site: 1.0)
    changed = difference(load(folder, STRATEGIES[strategy]), theirs)
    assert (changed > 1e-2) == (strategy not in ("PreNorm", "DenseFormer"))


def test_a_sharded_checkpoint_is_the_same_checkpoint(tmp_path):
    theirs, folder = save("Qwen2", tmp_path, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert difference(load(folder, PreNorm), theirs) < 1e-4


def test_bfloat16_weights_are_read_as_they_are(tmp_path):
    theirs = make("Llama 3.2").bfloat16()
    theirs.save_pretrained(tmp_path)
    config, _ = huggingface.read_config(tmp_path)
    weights = huggingface.read_weights(tmp_path, config)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert weights["embedding.weight"].equal(theirs.get_input_embeddings().weight)


def test_a_window_bounds_the_context(tmp_path):
    _, folder = save("Mistral", tmp_path)
    model = load(folder, PreNorm)
    assert model.config.max_seq_len == 40
    with pytest.raises(ValueError, match="41 tokens exceed max_seq_len=40"):
        model(tokens(41))


def test_every_name_goes_there_and_back():
    config = TransformerConfig(vocab_size=7, dim=8, num_layers=2, num_heads=2, qkv_bias=True, qk_norm=True)
    names = Transformer(config, PreNorm).state_dict()
    there = [huggingface.name_there(name) for name in names]
    assert [huggingface.name_here(name) for name in there] == list(names)
    theirs = {f"model.layers.1.self_attn.{part}" for part in ("q_proj.bias", "k_norm.weight", "o_proj.weight")}
    assert theirs | {"model.layers.0.post_attention_layernorm.weight", "lm_head.weight"} <= set(there)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2 is not supported: known are llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type=qwen3_moe is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu cannot be expressed"),
        ({"attention_bias": True}, "attention_bias=True cannot be expressed"),
        ({"mlp_bias": True}, "mlp_bias=True cannot be expressed"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_scaling.rope_type=longrope is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type=dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling of rope_type=linear needs factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor cannot be expressed"),
        ({"hidden_size": None}, "hidden_size=None is not a number"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_refused_by_name(changes, message, tmp_path):
    save("Llama 2", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as raised:
        huggingface.read_config(tmp_path)
    assert str(file) in str(raised.value)


def test_the_older_way_to_write_a_scaling(tmp_path):
    save("Llama 3.1", tmp_path)
    now, _ = huggingface.read_config(tmp_path)
    file = tmp_path / "config.json"
    found = json.loads(file.read_text())
    rope = found.pop("rope_parameters")
    found |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(found))
    assert huggingface.read_config(tmp_path)[0] == now
    found["rope_scaling"] = {"type": "linear", "factor": 2.0}
    file.write_text(json.dumps(found))
    assert huggingface.read_config(tmp_path)[0].rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_damaged_files_get_one_line(tmp_path):
    _, folder = save("Llama 2", tmp_path)
    config, _ = huggingface.read_config(folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damage in (whole[:-100], b"\x80\x04not safetensors", b""):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=r"model\.safetensors is missing or damaged"):
            huggingface.read_weights(folder, config)
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing or damaged"):
        huggingface.read_weights(folder, config)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        huggingface.read_weights(folder, config)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged: it is not JSON"):
        huggingface.read_config(folder)


def test_tables_that_old_files_hold_are_left_out(tmp_path):
    theirs, folder = save("Llama 2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")
    assert difference(load(folder, PreNorm), theirs) < 1e-4
