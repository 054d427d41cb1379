"""Perplexity and bits per byte of long documents, through a window that slides over them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnres_lit.data.documents import read_documents
from attnres_lit.data.shards import load_meta
from attnres_lit.data.tokenizers import Tokenizer, pack
from attnres_lit.model import Transformer
from attnres_lit.model.loss import next_token_nats

ROWS = 8  # windows at a time


@dataclass(frozen=True)
class Perplexity:
    """Totals over documents.

    Attributes:
        nats: cross entropy of all predicted tokens, ends of documents included.
        tokens: how many they are.
        bytes: UTF-8 bytes of the text that they spell; ends of documents have none.
        documents: how many there were.
    """

    nats: float
    tokens: int
    bytes: int
    documents: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return self.nats / math.log(2) / self.bytes


@torch.inference_mode()
def perplexity(
    model: Transformer,
    documents: Iterable[Sequence[int] | np.ndarray],
    token_bytes: Tensor,
    start: int,
    window: int | None = None,
    stride: int | None = None,
) -> Perplexity:
    """Predict every token of every document, with at least `window - stride` tokens before it where there are as many.

    A window of tokens slides over a document by `stride`; each token is counted in the first window that reaches it. A
    small stride gives every token a long past and costs `window / stride` passes over the text; a stride as long as the
    window reads the text once, as `validate` does, but never across documents.

    Args:
        model: in eval mode.
        documents: ids of each, its end of document included if that is to be predicted.
        token_bytes: UTF-8 bytes of each id, `(V,)`.
        start: the id before the first token of every document: `tokenizer.eod`.
        window: tokens that the model reads at a time; None: `max_seq_len`.
        stride: None: half the window.

    Raises:
        ValueError: a window longer than `max_seq_len` or below 1, a stride not between 1 and the window; no documents.
    """
    longest = model.config.max_seq_len
    window = longest if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= window <= longest:
        raise ValueError(f"window={window} must be between 1 and max_seq_len={longest}")
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride} must be between 1 and window={window}")
    nats, tokens, size, count = 0.0, 0, 0, 0
    for document in documents:
        ids = torch.tensor([start, *document])
        spans = windows(len(document), window, stride)
        count += bool(spans)
        tokens += len(document)
        size += int(token_bytes[ids[1:]].sum())
        for first in range(0, len(spans), ROWS):
            nats += _nats(model, ids, spans[first : first + ROWS])
    if not count:
        raise ValueError("there is no document with any token to predict")
    return Perplexity(nats, tokens, size, count)


def windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """The windows over a document of `length` tokens: where one begins, from where on it counts, and where it ends."""
    spans, counted = [], 0
    while counted < length:
        end = min(length, window if counted == 0 else counted + stride)
        spans.append((max(0, end - window), counted, end))
        counted = end
    return spans


def _nats(model: Transformer, ids: Tensor, spans: list[tuple[int, int, int]]) -> float:
    """Of windows of a document whose ids are those of its tokens, moved by one."""
    device = next(model.parameters()).device
    longest = max(end - begin for begin, _, end in spans)
    rows = torch.zeros(len(spans), longest + 1, dtype=torch.int64)
    counts = torch.zeros(len(spans), longest, dtype=torch.bool)
    for row, (begin, counted, end) in enumerate(spans):  # padded on the right, which no token before it sees
        rows[row, : end - begin + 1] = ids[begin : end + 1]
        counts[row, counted - begin : end - begin] = True
    rows = rows.to(device)
    nats = next_token_nats(model(rows[:, :-1]), rows[:, 1:], "none")
    return float(nats.double()[counts.to(device)].sum())


def split_perplexity(
    model: Transformer,
    tokenizer: Tokenizer,
    folder: str | Path,
    split: str = "val",
    limit: int | None = None,
    window: int | None = None,
    stride: int | None = None,
) -> Perplexity:
    """`perplexity` of the documents of a prepared corpus.

    Args:
        model: in eval mode.
        tokenizer: the model's; the corpus must have been prepared with it.
        folder: what `prepare` made.
        split: "val" or "train".
        limit: documents that are read, the first ones; None: all.
        window: as for `perplexity`.
        stride: as for `perplexity`.

    Raises:
        ValueError: as `perplexity`; the folder is not a prepared corpus, or one of another tokenizer.
    """
    meta = load_meta(folder)
    if (meta.tokenizer, meta.vocab_size) != (tokenizer.name, tokenizer.vocab_size):
        raise ValueError(
            f"{folder} was prepared with the tokenizer {meta.tokenizer}, the model reads {tokenizer.name}: prepare the "
            "corpus with that"
        )
    for name, learned in pack(tokenizer)["files"].items():
        if not (Path(folder) / name).is_file() or (Path(folder) / name).read_bytes() != learned:
            raise ValueError(f"{folder} was prepared with a {meta.tokenizer} that learned another vocabulary")
    documents = read_documents(folder, split, limit)
    return perplexity(model, documents, tokenizer.token_bytes(), tokenizer.eod, window, stride)
