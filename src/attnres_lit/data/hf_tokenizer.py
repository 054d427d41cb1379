"""The tokenizer of a pretrained model, from the `tokenizer.json` that lies beside its weights."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from attnres_lit.data.tokenizers import Ids, Tokenizer

_FILE, _SIZES = "tokenizer.json", "tokenizer_sizes.json"


class HFTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, as Hugging Face models have it; nothing to train.

    `vocab_size` is the model's where a `config.json` lies beside, which may be larger than the vocabulary. The end of
    document is the model's end of sequence. No text spells a special token: encoding takes them for text. Nothing is
    put before a document.

    Args:
        path: the folder of the model, or a `tokenizer.json`. Only needed until the corpus is prepared, or where a
            checkpoint brings the tokenizer with it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        folder = Path(path)
        self._folder = folder.parent if folder.suffix == ".json" else folder
        self.name = "hf-" + re.sub(r"[^\w.-]", "-", self._folder.resolve().name)
        self._loaded: tuple[tokenizers.Tokenizer, int, int] | None = None

    @property
    def vocab_size(self) -> int:  # pyrefly: ignore[bad-override]
        """Ids the model must provide for. Raises ValueError where there is no usable tokenizer at `path`."""
        return self._ready[1]

    @property
    def eod(self) -> int:  # pyrefly: ignore[bad-override]
        """The end of sequence. Raises ValueError as `vocab_size`."""
        return self._ready[2]

    def encode(self, text: str) -> Ids:
        """Ids of a text; special tokens in it are text."""
        return np.array(self._ready[0].encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Text of ids, as far as the tokenizer keeps all of it: some forget a space at the start."""
        return self._ready[0].decode([int(i) for i in ids if i != self.eod], skip_special_tokens=False)

    def token_bytes(self) -> Tensor:
        """UTF-8 bytes of each token; special tokens, which no text spells, have none."""
        tokenizer, size, _ = self._ready
        sizes = torch.zeros(size, dtype=torch.int64)
        of_bytes = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
            # a byte-level alphabet writes each byte as one character; others write a space as one of three bytes
            sizes[i] = len(token) if of_bytes else 1 if _is_byte(token) else len(token.replace("▁", " ").encode())
        for i, added in tokenizer.get_added_tokens_decoder().items():
            sizes[i] = 0 if added.special else len(added.content.encode())
        return sizes

    def train(self, documents: Iterator[str]) -> None:
        """Nothing to learn."""

    def save(self, dir: Path) -> None:
        """Write `tokenizer.json`, and what was read from the files beside it."""
        tokenizer, size, eod = self._ready
        tokenizer.save(str(dir / _FILE))
        (dir / _SIZES).write_text(json.dumps({"vocab_size": size, "eod": eod}))

    def load(self, dir: Path) -> None:
        """Read what `save` wrote. Raises ValueError if it is missing, damaged, or of another tokenizer than `path`."""
        sizes = _json(dir / _SIZES)
        found = _tokenizer(dir / _FILE), sizes["vocab_size"], sizes["eod"]
        if (self._folder / _FILE).is_file() and found[0].to_str() != self._ready[0].to_str():
            raise ValueError(f"{dir} was prepared with another tokenizer than {self.path}: set data.dir, or delete it")
        self._loaded = found

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer itself. Raises ValueError as `vocab_size`."""
        return self._ready[0]

    @property
    def _ready(self) -> tuple[tokenizers.Tokenizer, int, int]:
        """The tokenizer, the size of the vocabulary, the end of document."""
        if self._loaded is None:
            tokenizer = _tokenizer(self._folder / _FILE)
            known = max(tokenizer.get_vocab().values()) + 1
            size = max(known, _json(self._folder / "config.json").get("vocab_size") or 0)
            self._loaded = tokenizer, size, self._end_of_sequence(tokenizer)
        return self._loaded

    def _end_of_sequence(self, tokenizer: tokenizers.Tokenizer) -> int:
        token = _json(self._folder / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (found := tokenizer.token_to_id(token)) is not None:
            return found
        for file in ("generation_config.json", "config.json"):
            ids = _json(self._folder / file).get("eos_token_id")
            if ids is not None:
                return ids[0] if isinstance(ids, list) else ids
        raise ValueError(f"no file in {self._folder} says which token ends a text: add eos_token_id to its config.json")


def _is_byte(token: str) -> bool:
    """Whether it is one of those that stand for a byte of a character outside of the vocabulary."""
    return re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None


def _tokenizer(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ValueError(
            f"there is no {file}: transformers writes it, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is damaged: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none."""
    try:
        return json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError:
        raise ValueError(f"{file} is damaged: it is not JSON") from None
