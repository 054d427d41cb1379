"""Exports: `transformers` computes the same logits and generates, and what is read back is what was written."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from attnres_lit.data.tokenizers import BPETokenizer, ByteTokenizer
from attnres_lit.inference.export import export
from attnres_lit.model import Transformer, TransformerConfig, huggingface
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm
from attnres_lit.training.hparams import describe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {
    "Llama": {},
    "Llama, tied and scaled": {
        "tie_embeddings": True,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
    },
    "Mistral": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 6},
    "Llama, widths in a list": {"hidden_dim": [40, 40, 40]},
    "Qwen2": {"qkv_bias": True},
    "Qwen3": {"qk_norm": True, "head_dim": 12},
}
CUSTOM = {
    "block": (partial(BlockAttnRes, num_blocks=3), {}),
    "full": (FullAttnRes, {"qkv_bias": True, "qk_norm": True}),
    "mhc": (MHC, {"tie_embeddings": True}),
    "denseformer": (DenseFormer, {}),
    "prenorm with all": (PreNorm, {"qkv_bias": True, "qk_norm": True}),
    "prenorm of unequal widths": (PreNorm, {"hidden_dim": [24, 104, 8]}),
}


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    """A folder of its own for the copies that `transformers` makes of modelling files."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


def build(residual=PreNorm, **options):
    """A model with depth parameters that have moved."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 96}
    model = Transformer(TransformerConfig(**sizes | options), residual).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def exported(folder, residual=PreNorm, **options):
    model = build(residual, **options)
    export(model, describe(residual), ByteTokenizer(), folder)
    return model, transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def tokens(count=96, rows=2):
    return torch.randint(256, (rows, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PLAIN)
def test_prenorm_becomes_a_model_that_needs_no_code_of_ours(name, tmp_path):
    model, theirs = exported(tmp_path / "out", **PLAIN[name])
    assert type(theirs).__name__ == f"{name.split(',')[0]}ForCausalLM"
    assert type(theirs).__module__.startswith("transformers.models.")
    assert not list((tmp_path / "out").glob("*.py"))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", CUSTOM)
def test_any_other_model_computes_the_same_bits(name, tmp_path):
    residual, options = CUSTOM[name]
    model, theirs = exported(tmp_path / "out", residual, **options)
    with torch.inference_mode():
        logits = model(tokens())
        assert theirs(tokens()).logits.equal(logits)
        torch.testing.assert_close(theirs(tokens(), logits_to_keep=2).logits, logits[:, -2:])
        loss = theirs(tokens(), labels=tokens()).loss
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", CUSTOM)
def test_it_generates_with_a_cache_and_with_padding(name, tmp_path):
    residual, options = CUSTOM[name]
    _, theirs = exported(tmp_path / "out", residual, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    prompts = ["a longer prompt", "short"]
    together = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    greedy = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    rows = theirs.generate(**together, **greedy)[:, together.input_ids.shape[1] :]
    for prompt, row in zip(prompts, rows, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        expected = theirs.generate(**alone, **greedy, use_cache=False)[0, alone.input_ids.shape[1] :]
        assert row.tolist() == expected.tolist()
    right = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right")
    with torch.inference_mode():
        logits = theirs(**right).logits[1, : len("short")]
        torch.testing.assert_close(logits, theirs(**tokenizer("short", return_tensors="pt")).logits[0])
        with pytest.raises(ValueError, match="97 tokens exceed max_seq_len=96"):
            theirs(tokens(97))


@pytest.mark.parametrize("name", [*PLAIN, *CUSTOM])
def test_init_from_an_export_gives_the_tensors_back(name, tmp_path):
    residual, options = CUSTOM.get(name) or (PreNorm, PLAIN[name])
    model = build(residual, **options)
    export(model, describe(residual), ByteTokenizer(), tmp_path / "out")
    config, stored = huggingface.read_config(tmp_path / "out")
    assert stored["class_path"] == describe(residual)["class_path"]
    again = Transformer(config, residual)
    again.load_state_dict(huggingface.read_weights(tmp_path / "out", config))
    assert all(weight.equal(again.state_dict()[key]) for key, weight in model.state_dict().items())
    with torch.inference_mode():
        assert again(tokens()).equal(model(tokens()))


def test_saved_again_by_transformers_it_stays_the_same(tmp_path):
    model, theirs = exported(tmp_path / "out", MHC, tie_embeddings=True, hidden_dim=[24, 104, 8])
    theirs.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.inference_mode():
        assert again(tokens()).logits.equal(model(tokens()))


def test_bfloat16_halves_the_file(tmp_path):
    for dtype in ("float32", "bfloat16"):
        export(build(), describe(PreNorm), ByteTokenizer(), tmp_path / dtype, dtype)
    sizes = [(tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("float32", "bfloat16")]
    assert 1.8 < sizes[0] / sizes[1] < 2.0
    weights = load_file(tmp_path / "bfloat16/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPETokenizer(300), BPETokenizer(5000)], ids=lambda t: t.name)
def test_the_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.train(iter(["def f(x):\n    return x + 1\n", "naïve café, the cat and the hat"] * 5))
    model = build(vocab_size=tokenizer.vocab_size)
    export(model, describe(PreNorm), tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("", "  the cat\n\n\tand", "日本語 🏴 \x00", "don't </s> a_b  12345"):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs("<|endoftext|>").input_ids[0] == tokenizer.eod
    assert len(theirs) <= tokenizer.vocab_size


def test_mistakes_leave_nothing_behind(tmp_path):
    class Own(ByteTokenizer.__base__):
        name, vocab_size, eod = "own", 257, 256
        encode = decode = token_bytes = train = save = load = None

    model = build()
    with pytest.raises(ValueError, match=r"Own has no tokenizer\.json"):
        export(model, describe(PreNorm), Own(), tmp_path / "out")
    with pytest.raises(ValueError, match="dtype=int8 must be one of float32, bfloat16, float16"):
        export(model, describe(PreNorm), ByteTokenizer(), tmp_path / "out", "int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/out cannot be written"):
        export(model, describe(PreNorm), ByteTokenizer(), tmp_path / "file/out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out is there already"):
        export(model, describe(PreNorm), ByteTokenizer(), tmp_path / "out")


def test_it_runs_in_a_pipeline(tmp_path):
    exported(tmp_path / "out", BlockAttnRes)
    pipe = transformers.pipeline("text-generation", str(tmp_path / "out"), trust_remote_code=True)
    (reply,) = pipe("def ", max_new_tokens=5)
    assert reply["generated_text"].startswith("def ")
