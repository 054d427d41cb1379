"""Perplexity through a sliding window, against one forward a token; documents read back from shards."""

import math

import pytest
import torch

from attnres_lit.data.documents import read_documents
from attnres_lit.data.shards import prepare
from attnres_lit.data.tokenizers import BPETokenizer, ByteTokenizer
from attnres_lit.inference.evaluate import perplexity, split_perplexity, windows
from data.words import Words
from residual.models import CONFIGS, VOCAB, build, factory_from_yaml, scatter

START = VOCAB - 1
TOKEN_BYTES = torch.tensor([*[3] * (VOCAB - 1), 0])


@pytest.fixture(scope="module")
def model():
    return scatter(build(factory_from_yaml(CONFIGS / "prenorm.yaml"), max_seq_len=16)).eval()


def documents(*lengths):
    gen = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB - 1, (length,), generator=gen).tolist() for length in lengths]


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 1), (8, 3), (1, 1), (None, None)])
def test_every_token_is_counted_once_with_the_past_it_is_promised(model, window, stride):
    texts = documents(1, 5, 16, 17, 40)
    found = perplexity(model, texts, TOKEN_BYTES, START, window, stride)
    window, stride = window or 16, stride or 8
    nats = 0.0
    for text in texts:
        ids, counted = [START, *text], 0
        while counted < len(text):
            end = min(len(text), window if counted == 0 else counted + stride)
            for t in range(counted, end):
                begin = max(0, end - window)
                logits = model(torch.tensor([ids[begin : t + 1]]))[0, -1]
                nats -= float(logits.log_softmax(-1)[ids[t + 1]])
            counted = end
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert (found.tokens, found.bytes, found.documents) == (79, 3 * 79, 5)
    assert found.loss == pytest.approx(nats / 79)
    assert found.perplexity == pytest.approx(math.exp(nats / 79))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / (3 * 79))


def test_windows_cover_a_document():
    assert windows(10, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert windows(5, 4, 4) == [(0, 0, 4), (1, 4, 5)]
    assert windows(3, 4, 1) == [(0, 0, 3)]
    assert windows(0, 4, 1) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 17}, "window=17 must be between 1 and max_seq_len=16"),
        ({"window": 0}, "window=0"),
        ({"window": 4, "stride": 5}, "stride=5 must be between 1 and window=4"),
        ({"stride": 0}, "stride=0"),
    ],
)
def test_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(model, documents(3), TOKEN_BYTES, START, **options)


def test_refuses_nothing(model):
    with pytest.raises(ValueError, match="no document"):
        perplexity(model, [[]], TOKEN_BYTES, START)


@pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")
@pytest.mark.parametrize("piece", [7, 2**20])
def test_documents_come_back_whole_from_any_number_of_chunks(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("attnres_lit.data.shards._PIECE", piece)
    monkeypatch.setattr("attnres_lit.data.shards.CHUNK_BYTES", 64 * piece)
    corpus, tokenizer = Words(40), ByteTokenizer()
    prepare(corpus, tokenizer, tmp_path / "words", 0.3)
    assert (len(list((tmp_path / "words/train").glob("*.bin"))) > 1) == (piece == 7)
    back = {split: list(read_documents(tmp_path / "words", split)) for split in ("train", "val")}
    assert all(ids[-1] == tokenizer.eod for split in back.values() for ids in split)
    texts = [tokenizer.decode(ids) for split in back.values() for ids in split]
    assert sorted(texts) == sorted(corpus.documents())
    assert len(list(read_documents(tmp_path / "words", "train", limit=3))) == 3
    with pytest.raises(ValueError, match="has train and val"):
        next(read_documents(tmp_path / "words", "test"))
    (tmp_path / "words/val/index.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        next(read_documents(tmp_path / "words", "val"))


def test_a_split_needs_the_tokenizer_of_the_model(tmp_path):
    tokenizer = ByteTokenizer()
    prepare(Words(40), tokenizer, tmp_path / "words", 0.3)
    model = build(factory_from_yaml(CONFIGS / "prenorm.yaml"), vocab_size=257, max_seq_len=16).eval()
    found = split_perplexity(model, tokenizer, tmp_path / "words", limit=4)
    assert found.documents == 4
    assert found.bytes == found.tokens - 4
    with pytest.raises(ValueError, match="prepared with the tokenizer bytes, the model reads bpe300"):
        split_perplexity(model, BPETokenizer(300), tmp_path / "words")
