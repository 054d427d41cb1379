"""Tokenizers as they lie beside pretrained models: byte-level ones, and ones that write a space as ▁."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from attnres_lit.data.hf_tokenizer import HFTokenizer
from attnres_lit.data.tokenizers import pack, unpack

SAMPLE = ["def f(x):\n    return x + 1\n", "the cat and the hat, the cat and the rat", "naïve café"] * 5
HARD = ["", "  leading, trailing  \n\n\t", "日本語 🏴‍☠️", "<|endoftext|></s><eos>", "never seen: ßðŋ ≠ ∑ 12345"]


def byte_level():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(SAMPLE, trainer)
    made.add_tokens([AddedToken("    ", normalized=False)])  # a run of spaces, added but no special token
    return made, "<|endoftext|>"


def metaspace():
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghinorthx", "th", "▁the"]
    pieces = {piece: i for i, piece in enumerate([*vocab, "the"])}
    made = tokenizers.Tokenizer(
        models.BPE(pieces, [("t", "h"), ("th", "e"), ("▁", "the")], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made, "</s>"


@pytest.fixture(params=[byte_level, metaspace], ids=lambda make: make.__name__)
def folder(request, tmp_path):
    """As `save_pretrained` leaves it, in a model whose vocabulary is padded."""
    made, end = request.param()
    dir = tmp_path / "Some-Model"
    dir.mkdir()
    made.save(str(dir / "tokenizer.json"))
    (dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    (dir / "config.json").write_text(json.dumps({"vocab_size": 384, "eos_token_id": 5}))
    return dir


@pytest.mark.parametrize("text", HARD + SAMPLE[:3])
def test_text_survives_and_its_bytes_are_counted(folder, text):
    tokenizer = HFTokenizer(str(folder))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids
    sizes = tokenizer.token_bytes()
    assert sizes.shape == (384,)
    assert sizes[tokenizer.eod] == 0
    assert sizes[ids.astype(np.int64)].sum() == len(text.encode())


def test_its_sizes_are_those_of_the_model(folder):
    tokenizer = HFTokenizer(str(folder))
    assert tokenizer.name == "hf-Some-Model"
    assert tokenizer.vocab_size == 384
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.eod == made.token_to_id("<|endoftext|>" if made.token_to_id("</s>") is None else "</s>")
    (folder / "tokenizer_config.json").unlink()
    assert HFTokenizer(str(folder / "tokenizer.json")).eod == 5
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="says which token ends a text"):
        _ = HFTokenizer(str(folder)).eod


def test_a_prepared_folder_and_a_checkpoint_have_all_of_it(folder, tmp_path):
    tokenizer = HFTokenizer(str(folder))
    packed = pack(tokenizer)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    tokenizer.save(prepared)
    tokenizer.load(prepared)
    (folder / "tokenizer.json").rename(tmp_path / "gone.json")
    loaded = HFTokenizer(str(folder))
    loaded.load(prepared)
    for each in (loaded, unpack(packed)):
        assert (each.vocab_size, each.eod, each.name) == (384, tokenizer.eod, "hf-Some-Model")
        np.testing.assert_array_equal(each.encode(SAMPLE[0]), tokenizer.encode(SAMPLE[0]))


def test_errors(folder, tmp_path):
    tokenizer = HFTokenizer(str(folder))
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    tokenizer.save(prepared)
    other, _ = byte_level()
    other.add_tokens(["another"])
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        HFTokenizer(str(folder)).load(prepared)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        _ = HFTokenizer(str(folder)).vocab_size
    with pytest.raises(ValueError, match=r"there is no .*tokenizer\.json: transformers writes it"):
        HFTokenizer(str(tmp_path)).encode("a")
