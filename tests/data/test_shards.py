import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader

from attnres_lit.data import shards
from attnres_lit.data.corpora import TextFiles
from attnres_lit.data.shards import load_meta, prepare, verify
from attnres_lit.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer
from data.words import Words

fork = multiprocessing.get_context("fork")


def documents(dir: Path, split: str, tokenizer: Tokenizer) -> list[str]:
    """The documents read back from the shards, one token at a time."""
    stream = StreamingDataset(str(dir / split), item_loader=TokensLoader(block_size=1))
    ids = np.array([int(stream[i][0]) for i in range(len(stream))])
    assert ids[-1] == tokenizer.eod
    ends = np.flatnonzero(ids == tokenizer.eod)
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]


class Overflowing(ByteTokenizer):
    """Gives an id of 2**16 + 7, which two bytes would store as 7."""

    def encode(self, text):
        return super().encode(text).astype(np.int64) + 2**16 + 7


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="its vocab_size is 257"):
        prepare(Words(60), Overflowing(), tmp_path / "d", val_fraction=0.3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPETokenizer(300), BPETokenizer(70_000)], ids=lambda t: t.name)
def test_every_document_comes_back_from_exactly_one_split(tmp_path: Path, tokenizer: Tokenizer):
    corpus = Words(60)
    meta = prepare(corpus, tokenizer, tmp_path / "d", val_fraction=0.3)
    train, val = (documents(tmp_path / "d", split, tokenizer) for split in ("train", "val"))
    assert sorted(train + val) == sorted(corpus.documents())
    assert 5 < len(val) < 35
    assert meta.dtype == ("uint32" if tokenizer.vocab_size > 2**16 else "uint16")
    assert (meta.splits["train"].documents, meta.splits["val"].documents) == (len(train), len(val))
    assert meta.splits["val"].bytes == sum(len(text.encode()) for text in val)
    assert meta.splits["val"].tokens == sum(len(tokenizer.encode(text)) + 1 for text in val)
    assert meta.trained_vocab_size <= meta.vocab_size == tokenizer.vocab_size


def test_split_depends_on_the_text_alone(tmp_path: Path):
    class Reversed(Words):
        def documents(self) -> Iterator[str]:
            texts = list(super().documents())
            yield from reversed(texts + texts[:10])

    tokenizer = ByteTokenizer()
    prepare(Words(60), tokenizer, tmp_path / "a", val_fraction=0.3)
    prepare(Reversed(60), tokenizer, tmp_path / "b", val_fraction=0.3)
    prepare(Words(60), tokenizer, tmp_path / "c", val_fraction=0.3, split_seed=1)
    a, b, c = (set(documents(tmp_path / name, "val", tokenizer)) for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")
def test_documents_longer_than_a_piece_and_chunks_smaller_than_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shards, "_PIECE", 17)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2000)
    tokenizer, corpus = ByteTokenizer(), Words(200)
    meta = prepare(corpus, tokenizer, tmp_path / "d", val_fraction=0.3)
    assert sum(name.startswith("train/chunk") for name in meta.files) > 1
    texts = documents(tmp_path / "d", "train", tokenizer) + documents(tmp_path / "d", "val", tokenizer)
    assert sorted(texts) == sorted(corpus.documents())


def test_prepare_is_idempotent_and_leaves_only_the_folder(tmp_path: Path):
    first = prepare(Words(), ByteTokenizer(), tmp_path / "d")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert prepare(Words(), ByteTokenizer(), tmp_path / "d") == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert set(first.files) | {"meta.json"} == {
        path.relative_to(tmp_path / "d").as_posix() for path in (tmp_path / "d").rglob("*") if path.is_file()
    }


def test_bpe_is_trained_on_the_training_split_and_loaded_by_a_later_run(tmp_path: Path):
    class Marked(Words):
        """Documents of the validation split alone hold the words `zyzzyva`."""

        def documents(self) -> Iterator[str]:
            yield from Words(60).documents()
            yield "zyzzyva " * 50 + "1"  # the hash of this one falls into the validation split

    trained, loaded = BPETokenizer(300), BPETokenizer(300)
    prepare(Marked(), trained, tmp_path / "d", val_fraction=0.3)
    assert any("zyzzyva" in text for text in documents(tmp_path / "d", "val", trained))
    assert len(trained.encode("zyzzyva")) == len("zyzzyva")
    prepare(Marked(), loaded, tmp_path / "d", val_fraction=0.3)
    assert list(loaded.encode("document 7")) == list(trained.encode("document 7"))


class Deadly(Words):
    """Kills its process at document 200."""

    def documents(self) -> Iterator[str]:
        for i, text in enumerate(super().documents()):
            if i == 200:
                os.kill(os.getpid(), signal.SIGKILL)
            yield text


@pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")
def test_a_killed_preparation_is_not_mistaken_for_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_PIECE", 17)  # so that some chunks are on disk by then
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2000)
    process = fork.Process(target=prepare, args=(Deadly(), ByteTokenizer(), tmp_path / "d"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob("d.partial/train/chunk*"))
    assert not (tmp_path / "d").exists()
    assert prepare(Words(), ByteTokenizer(), tmp_path / "d").splits["train"].documents > 250
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


class Slow(Words):
    """Takes half a second, and leaves a mark each time it is read."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self.marks = marks

    def documents(self) -> Iterator[str]:
        (self.marks / str(os.getpid())).touch()
        time.sleep(0.5)
        yield from super().documents()


def test_of_processes_preparing_at_once_one_writes(tmp_path: Path):
    (tmp_path / "marks").mkdir()
    args = (Slow(tmp_path / "marks"), ByteTokenizer(), tmp_path / "d")
    processes = [fork.Process(target=prepare, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "marks").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "marks"]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path):
    class Broken(Words):
        def documents(self) -> Iterator[str]:
            yield from super().documents()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        prepare(Broken(), ByteTokenizer(), tmp_path / "root" / "d")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("field", ["corpus", "tokenizer", "val_fraction", "split_seed", "documents"])
def test_a_folder_made_with_other_settings_is_refused(tmp_path: Path, field: str):
    dir = tmp_path / "d"
    prepare(Words(), ByteTokenizer(), dir, val_fraction=0.1)
    corpus = {"corpus": Words(name="verbs"), "documents": Words(301)}.get(field, Words())
    tokenizer = BPETokenizer(300) if field == "tokenizer" else ByteTokenizer()
    val_fraction, split_seed = 0.2 if field == "val_fraction" else 0.1, int(field == "split_seed")
    messages = {
        "corpus": "with corpus 'words', the config asks for 'verbs'",
        "tokenizer": "with tokenizer 'bytes', the config asks for 'bpe300'",
        "val_fraction": "with val_fraction 0.1, the config asks for 0.2",
        "split_seed": "with split_seed 0, the config asks for 1",
        "documents": "from other documents than words has now",
    }
    with pytest.raises(ValueError, match=messages[field]) as error:
        prepare(corpus, tokenizer, dir, val_fraction, split_seed)
    assert str(dir) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda dir: (dir / "train/chunk-0-0.bin").unlink(), "train/chunk-0-0.bin is missing"),
        (lambda dir: os.truncate(dir / "val/chunk-0-0.bin", 100), "val/chunk-0-0.bin has 100 bytes instead of"),
        (lambda dir: (dir / "val/index.json").unlink(), "val/index.json is missing"),
        (lambda dir: (dir / "meta.json").unlink(), "holds no meta.json"),
        (lambda dir: os.truncate(dir / "meta.json", 50), "meta.json is damaged"),
        (lambda dir: (dir / "meta.json").write_bytes(b"\xff"), "meta.json is damaged"),
        (lambda dir: (dir / "meta.json").write_text('{"format": 1}'), "meta.json is damaged"),
        (lambda dir: (dir / "meta.json").write_text('{"format": 99}'), "has format 99, not 1"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage, message: str):
    dir = tmp_path / "d"
    prepare(Words(), ByteTokenizer(), dir)
    damage(dir)
    for check in (prepare, verify):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            check(Words(), ByteTokenizer(), dir, 0.05, 0)
        assert "\n" not in str(error.value)


def test_a_foreign_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"holds no meta\.json"):
        prepare(Words(), ByteTokenizer(), tmp_path / "d")
    assert (tmp_path / "d" / "thesis.txt").read_text() == "precious"
    with pytest.raises(ValueError, match="does not exist"):
        load_meta(tmp_path / "none")


def test_corpora_that_give_no_split(tmp_path: Path):
    with pytest.raises(ValueError, match="the corpus words is empty"):
        prepare(Words(0), ByteTokenizer(), tmp_path / "d")
    with pytest.raises(ValueError, match=r"none of the 1 documents of words falls into the (train|val) split"):
        prepare(Words(1), ByteTokenizer(), tmp_path / "d")
    for fraction in (0.0, 1.0, -0.1, 2.0):
        with pytest.raises(ValueError, match=f"val_fraction is {fraction}"):
            prepare(Words(), ByteTokenizer(), tmp_path / "d", fraction)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        prepare(Words(), ByteTokenizer(), tmp_path / "file" / "d")


def test_lone_surrogates_become_question_marks(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} \ud800"}) + "\n" for i in range(30)))
    prepare(TextFiles(str(path)), ByteTokenizer(), tmp_path / "d", val_fraction=0.3)
    assert all(text.endswith(" ?") for text in documents(tmp_path / "d", "val", ByteTokenizer()))
