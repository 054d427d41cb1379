"""Shards: a corpus tokenised once into a folder that LitData streams from.

    <dir>/meta.json        what is in the folder; a folder without it is not a prepared corpus
          tokenizer.json   the learned vocabulary, if the tokenizer learns one
          train/, val/     index.json and chunk-*.bin: token ids end to end, each document closed by the end of document

The writer is LitData's own, run in this process. `litdata.optimize` drives the same one from worker processes, but
on the way it changes the global multiprocessing start method, takes over SIGINT, and empties shared folders of the
system's temporary directory; and it fails in a script without `if __name__ == "__main__"`.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from litdata.streaming import Cache, TokensLoader
from tqdm import tqdm

from attnres_lit.data.corpora import Corpus
from attnres_lit.data.tokenizers import Tokenizer

FORMAT = 1  # raised when an older folder can no longer be read
SPLITS = ("train", "val")
CHUNK_BYTES = (
    64 * 2**20
)  # blocks are shuffled within a chunk: large chunks mix well, and bound the memory of a preparation
_PIECE = 2**20  # tokens given to LitData at a time, so that one huge document does not make one huge chunk


@dataclass(frozen=True)
class Split:
    """What one split holds: documents, tokens (ends of document included), and UTF-8 bytes of text."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`.

    `trained_vocab_size` counts the ids that can occur, at most `vocab_size`; `files` holds the size in bytes of every
    other file in the folder.
    """

    format: int
    corpus: str
    fingerprint: str
    tokenizer: str
    vocab_size: int
    trained_vocab_size: int
    eod: int
    dtype: str
    val_fraction: float
    split_seed: int
    splits: dict[str, Split]
    files: dict[str, int]
    versions: dict[str, str]


def prepare(
    corpus: Corpus, tokenizer: Tokenizer, dir: str | Path, val_fraction: float = 0.05, split_seed: int = 0
) -> Meta:
    """Write a corpus into a folder, unless it is there already, and load the tokenizer's vocabulary.

    A document goes to the validation split when the hash of its text, keyed by `split_seed`, falls below
    `val_fraction`: the order does not matter, and equal documents stay on one side. The folder appears complete or
    not at all; a second process waits for the first.

    Args:
        corpus: where the documents come from.
        tokenizer: trained here, on the training documents, if it learns its vocabulary.
        dir: the folder to make.
        val_fraction: share of documents for validation, between 0 and 1.
        split_seed: draws another validation split.

    Raises:
        ValueError: a split would be empty; the input cannot be read; the folder holds something else, is damaged, or
            was made with other settings or from other documents.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}: it must lie between 0 and 1, both excluded")
    dir = Path(dir)
    try:
        if not dir.exists():  # a prepared folder may lie on a read-only disk
            dir.parent.mkdir(parents=True, exist_ok=True)
            with _alone(dir):
                if not dir.exists():
                    _write_whole(corpus, tokenizer, dir, val_fraction, split_seed)
    except OSError as error:
        raise ValueError(f"{dir} cannot be written ({error}): set data.root or data.dir to another place") from None
    meta = verify(corpus, tokenizer, dir, val_fraction, split_seed)
    fingerprint = corpus.fingerprint()
    if meta.fingerprint != fingerprint:
        raise ValueError(
            f"{dir} was made from other documents than {corpus.name} has now (fingerprint {meta.fingerprint[:8]}, now "
            f"{fingerprint[:8]}): delete it, or set data.dir to another folder"
        )
    return meta


def verify(corpus: Corpus, tokenizer: Tokenizer, dir: str | Path, val_fraction: float, split_seed: int) -> Meta:
    """Check a prepared folder against the settings and its files against their recorded sizes; load the vocabulary.

    Raises:
        ValueError: one line that names what differs, both values and the remedy.
    """
    dir = Path(dir)
    meta = load_meta(dir)
    expected = {
        "corpus": corpus.name,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "val_fraction": val_fraction,
        "split_seed": split_seed,
    }
    for field, value in expected.items():
        if getattr(meta, field) != value:
            raise ValueError(
                f"{dir} was prepared with {field} {getattr(meta, field)!r}, the config asks for {value!r}: change the "
                "config, set data.dir to another folder, or delete this one"
            )
    for name, size in meta.files.items():
        path = dir / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: delete {dir} and prepare again")
        if path.stat().st_size != size:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes instead of {size}: delete {dir} and prepare again"
            )
    tokenizer.load(dir)
    return meta


def load_meta(dir: str | Path) -> Meta:
    """Read `meta.json`. Raises ValueError if it is missing, damaged, or of another format."""
    path = Path(dir) / "meta.json"
    if not path.parent.exists():
        raise ValueError(f"{dir} does not exist: prepare the corpus first")
    if not path.is_file():
        raise ValueError(f"{dir} holds no meta.json, so it is not a prepared corpus: delete it, or set data.dir")
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
        if fields["format"] != FORMAT:
            raise ValueError(f"{path} has format {fields['format']}, not {FORMAT}: delete {dir} and prepare again")
        fields["splits"] = {name: Split(**fields["splits"][name]) for name in SPLITS}
        return Meta(**fields)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: delete {dir} and prepare again") from None


@contextmanager
def _alone(dir: Path) -> Generator[None, None, None]:
    """Hold the lock on preparing `dir`; the system frees it when its holder dies."""
    lock = FileLock(f"{dir}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process that prepares {dir}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes it on release; waiters take note and lock a new file
            Path(lock.lock_file).unlink()
        lock.release()


def _write_whole(corpus: Corpus, tokenizer: Tokenizer, dir: Path, val_fraction: float, split_seed: int) -> None:
    """`_write` beside `dir`, then rename."""
    partial = Path(f"{dir}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was killed
    try:
        _write(corpus, tokenizer, partial, val_fraction, split_seed)
        partial.rename(dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(corpus: Corpus, tokenizer: Tokenizer, dir: Path, val_fraction: float, split_seed: int) -> None:
    fingerprint = corpus.fingerprint()  # before reading: a change in between then shows
    dir.mkdir()

    def documents(task: str) -> Iterator[tuple[str, str, int]]:
        """(split, text, bytes) of each document."""
        for text in tqdm(corpus.documents(), f"{task} {corpus.name}", unit=" documents", disable=None):
            raw = text.encode(errors="replace")  # a lone surrogate, which JSON can spell, becomes "?"
            digest = blake2b(raw, digest_size=8, key=str(split_seed).encode()).digest()
            split = "val" if int.from_bytes(digest) < val_fraction * 2**64 else "train"
            yield split, raw.decode(), len(raw)

    tokenizer.train(text for split, text, _ in documents("training the tokenizer on") if split == "train")
    tokenizer.save(dir)

    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    writers = {split: _ShardWriter(dir / split, dtype) for split in SPLITS}
    for split, text, size in documents("preparing"):
        ids = np.append(tokenizer.encode(text), tokenizer.eod)
        if not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:  # stored in few bytes, it could become another id
            raise ValueError(
                f"{tokenizer.name} gives the id {max(ids, key=abs)}: its vocab_size is {tokenizer.vocab_size}"
            )
        writers[split].add(ids, size)
    splits = {split: writer.close() for split, writer in writers.items()}
    total = sum(split.documents for split in splits.values())
    if not total:
        raise ValueError(f"the corpus {corpus.name} is empty: no document holds any text")
    for name, split in splits.items():
        if not split.documents:
            raise ValueError(
                f"none of the {total} documents of {corpus.name} falls into the {name} split: change val_fraction or "
                "split_seed, or cut the corpus into more documents"
            )
    meta = Meta(
        format=FORMAT,
        corpus=corpus.name,
        fingerprint=fingerprint,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        trained_vocab_size=int(tokenizer.token_bytes().count_nonzero()) + 1,
        eod=tokenizer.eod,
        dtype=dtype.name,
        val_fraction=val_fraction,
        split_seed=split_seed,
        splits=splits,
        files={
            path.relative_to(dir).as_posix(): path.stat().st_size for path in sorted(dir.rglob("*")) if path.is_file()
        },
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in ("attnres_lit", "litdata", "tokenizers")},
        },
    )
    (dir / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n")


class _ShardWriter:
    """Writes one split in LitData's format, in pieces of any number of documents."""

    def __init__(self, dir: Path, dtype: np.dtype) -> None:
        self._dir = dir
        self._dtype = dtype
        self._cache = Cache(str(dir), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
        self._buffer: list[np.ndarray] = []
        self._buffered = self._pieces = self._documents = self._tokens = self._bytes = 0

    def add(self, ids: np.ndarray, size: int) -> None:
        """Write the ids of one document of `size` bytes."""
        self._buffer.append(ids.astype(self._dtype))
        self._buffered += len(ids)
        if self._buffered >= _PIECE:
            self._flush()
        self._documents += 1
        self._tokens += len(ids)
        self._bytes += size

    def close(self) -> Split:
        """Write what is left and the index."""
        if self._documents:
            self._flush()
            self._cache.done()
            (index,) = self._dir.glob("*.index.json")  # LitData's per-writer index; we are the only writer
            os.replace(index, self._dir / "index.json")
        return Split(self._documents, self._tokens, self._bytes)

    def _flush(self) -> None:
        ids = np.concatenate(self._buffer or [np.empty(0, self._dtype)])
        for start in range(0, len(ids), _PIECE):
            self._cache[self._pieces] = ids[start : start + _PIECE]
            self._pieces += 1
        self._buffer, self._buffered = [], 0
