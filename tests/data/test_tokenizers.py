from pathlib import Path

import numpy as np
import pytest
import torch

from attnres_lit.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer

SAMPLE = ["def f(x):\n    return x + 1\n", "the cat and the hat, the cat and the rat", "naïve café"] * 5
HARD = [
    "",
    " ",
    "  leading, trailing  \n\n\t",
    "e\u0301 \u00e9 \ufb01 \u212b",  # a normaliser would change these
    "日本語 🏴‍☠️ \x00\x1b\u2028\r\n",
    "<|endoftext|></s><eos><pad>[SEP]",
    "never seen: ßðŋ ≠ ∑ 12345",
]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = ByteTokenizer() if request.param == "bytes" else BPETokenizer(300)
    tokenizer.train(iter(SAMPLE))
    return tokenizer


@pytest.mark.parametrize("text", HARD + SAMPLE[:3])
def test_round_trip_is_lossless(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert isinstance(ids, np.ndarray)
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.from_numpy(ids.astype(np.int64))) == text


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer):
    sizes = tokenizer.token_bytes()
    assert sizes.shape == (tokenizer.vocab_size,)
    assert sizes.dtype == torch.int64
    assert sizes[tokenizer.eod] == 0
    for text in HARD + SAMPLE:
        assert sizes[tokenizer.encode(text).astype(np.int64)].sum() == len(text.encode())


def test_no_text_spells_the_end_of_document(tokenizer: Tokenizer):
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert all(tokenizer.eod not in tokenizer.encode(text) for text in HARD)
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode("b")]) == "ab"


def test_bpe_learns_and_stays_within_the_requested_size():
    tokenizer = BPETokenizer(100_000)
    tokenizer.train(iter(SAMPLE))
    used = int(tokenizer.token_bytes().count_nonzero())
    assert 256 < used < 1000
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_bpe_with_no_room_for_pairs_is_bytes():
    tokenizer = BPETokenizer(257)
    tokenizer.train(iter(SAMPLE))
    assert len(tokenizer.encode("abc")) == 3


def test_bpe_training_is_repeatable_and_survives_save_and_load(tmp_path: Path):
    one, other, loaded = BPETokenizer(300), BPETokenizer(300), BPETokenizer(300)
    one.train(iter(SAMPLE))
    other.train(iter(SAMPLE))
    one.save(tmp_path)
    loaded.load(tmp_path)
    for text in HARD + SAMPLE[:3]:
        np.testing.assert_array_equal(one.encode(text), other.encode(text))
        np.testing.assert_array_equal(one.encode(text), loaded.encode(text))


def test_bpe_errors(tmp_path: Path):
    with pytest.raises(ValueError, match=r"vocab_size is 256: .* at least 257"):
        BPETokenizer(256)
    with pytest.raises(ValueError, match="no vocabulary yet"):
        BPETokenizer(300).encode("a")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing or damaged"):
        BPETokenizer(300).load(tmp_path)
