"""Tokenizers: text to ids and back, without loss, and with a vocabulary size known before any training."""

import inspect
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

Ids = np.ndarray  # 1-D, of an integer type


class Tokenizer(ABC):
    """Text to ids and back. The end-of-document id is never the result of encoding a text.

    A subclass keeps the options of its constructor as attributes of the same name, so that a checkpoint can hold it.

    Attributes:
        name: short and safe in file names; part of the default folder of the shards.
        vocab_size: ids the model must provide for, `eod` included; the largest id is below it.
        eod: id that `prepare` writes after each document; also the start of an unprompted generation.
    """

    name: str
    vocab_size: int
    eod: int

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of a text, without an end of document."""

    @abstractmethod
    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Text of ids; ends of document vanish, and bytes that are not whole characters become U+FFFD."""

    @abstractmethod
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes of text that each id stands for: int64 `(vocab_size,)`, 0 for the end of document."""

    @abstractmethod
    def train(self, documents: Iterator[str]) -> None:
        """Learn the vocabulary from documents; leave them unread if there is nothing to learn."""

    @abstractmethod
    def save(self, dir: Path) -> None:
        """Write what was learned into a folder."""

    @abstractmethod
    def load(self, dir: Path) -> None:
        """Read what `save` wrote. Raises ValueError if it is missing or damaged."""


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, then the end of document: 257 ids and nothing to train."""

    name = "bytes"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> Ids:
        """The UTF-8 bytes."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Text of bytes."""
        return bytes(int(i) for i in ids if i < self.eod).decode(errors="replace")

    def token_bytes(self) -> Tensor:
        """One for every byte."""
        sizes = torch.ones(self.vocab_size, dtype=torch.int64)
        sizes[self.eod] = 0
        return sizes

    def train(self, documents: Iterator[str]) -> None:
        """Nothing to learn."""

    def save(self, dir: Path) -> None:
        """Nothing to write."""

    def load(self, dir: Path) -> None:
        """Nothing to read."""


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, trained on the training documents and kept beside the shards.

    A small corpus may yield fewer pairs than asked for; the ids in between then stay unused. The end of document is the
    last id and unknown to the BPE itself, so no text can spell it.

    Args:
        vocab_size: ids in all: 256 bytes, the learned pairs, and the end of document.

    Raises:
        ValueError: vocab_size leaves no room for the bytes and the end of document.
    """

    _FILE = "tokenizer.json"

    def __init__(self, vocab_size: int = 4096) -> None:
        if vocab_size < 257:
            raise ValueError(f"vocab_size is {vocab_size}: a byte-level BPE needs at least 257 (256 bytes and the end)")
        self.name = f"bpe{vocab_size}"
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self._bpe: tokenizers.Tokenizer | None = None

    def train(self, documents: Iterator[str]) -> None:
        """Learn the pairs."""
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = byte_level(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1, initial_alphabet=byte_level.alphabet(), show_progress=False
        )
        bpe.train_from_iterator(documents, trainer)
        self._bpe = bpe

    def encode(self, text: str) -> Ids:
        """The ids of the byte pairs."""
        return np.array(self.library.encode(text).ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Text of byte pairs."""
        return self.library.decode([int(i) for i in ids if i < self.eod])

    def token_bytes(self) -> Tensor:
        """The length of every byte pair."""
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)
        for token, i in self.library.get_vocab().items():
            sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
        return sizes

    def save(self, dir: Path) -> None:
        """Write `tokenizer.json`."""
        self.library.save(str(dir / self._FILE))

    def load(self, dir: Path) -> None:
        """Read `tokenizer.json`."""
        path = dir / self._FILE
        try:
            self._bpe = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is missing or damaged ({error}): delete {dir} and prepare again") from None

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The trained BPE itself. Raises ValueError before it is trained."""
        if self._bpe is None:
            raise ValueError("the BPE tokenizer has no vocabulary yet: prepare the corpus, or load a prepared folder")
        return self._bpe


def pack(tokenizer: Tokenizer) -> dict[str, Any]:
    """A trained tokenizer as plain values and bytes, for a checkpoint: its class, its options, what `save` writes."""
    cls = type(tokenizer)
    options = {name: getattr(tokenizer, name) for name in inspect.signature(cls).parameters if hasattr(tokenizer, name)}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": options, "files": files}


def unpack(packed: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `pack` was given.

    Raises:
        ValueError: its class cannot be imported or built; what it learned is damaged.
    """
    module, _, name = packed["class_path"].rpartition(".")
    try:
        cls = getattr(import_module(module), name)
        if not issubclass(cls, Tokenizer):
            raise TypeError(f"{name} is no Tokenizer")
        tokenizer = cls(**packed["init_args"])
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"the tokenizer {packed['class_path']} cannot be built here: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        for file, content in packed["files"].items():
            (Path(folder) / Path(file).name).write_bytes(content)
        tokenizer.load(Path(folder))
    return tokenizer
