"""Generation with a key-value cache: prompts of any lengths side by side, each as if it were alone."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from attnres_lit.inference.sampling import Sampling
from attnres_lit.model import Transformer
from attnres_lit.model.kv_cache import KVCache

PREFILL_CHUNK = 512  # tokens; the sources of a prompt are alive for one chunk at a time


def generate(
    model: Transformer,
    tokens: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    end: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[list[int]]:
    """Continue every row of a batch.

    Args:
        model: in eval mode, on any device.
        tokens: `(B, T)`, or B sequences of any lengths.
        max_new_tokens: tokens added to a row at most; it also ends once the model has read `max_seq_len` tokens of it.
        sampling: how tokens are drawn.
        end: the token after which a row ends, such as `tokenizer.eod`; None: there is none.
        prefill_chunk: tokens of the prompts that are read at a time.

    Returns:
        The new tokens of each row, without `end`.

    Raises:
        ValueError: a prompt is empty, or longer than `max_seq_len`, or holds an unknown id; an option is out of range.
    """
    rows: list[list[int]] = [[] for _ in tokens]
    for step in stream(model, tokens, max_new_tokens, sampling, end, prefill_chunk):
        for row, token in step.items():
            rows[row].append(token)
    return rows


@torch.inference_mode()
def stream(
    model: Transformer,
    tokens: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    end: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    ended: Callable[[int], bool] = lambda row: False,
) -> Generator[dict[int, int]]:
    """As `generate`, step by step.

    Args:
        model, tokens, max_new_tokens, sampling, end, prefill_chunk: as for `generate`.
        ended: asked after every step whether a row shall go on.

    Yields:
        The next token of every row that has not ended, by row.

    Raises:
        ValueError: as `generate`, at the first step.
    """
    texts = [row.tolist() if isinstance(row, Tensor) else list(row) for row in tokens]
    _check(model, texts, max_new_tokens, prefill_chunk)
    config, parameter = model.config, next(model.parameters())
    slots = min(config.max_seq_len, max(map(len, texts)) + max_new_tokens)
    cache = KVCache(config, len(texts), slots, model.source_dtype(parameter.device), parameter.device)
    generators = [sampling.generator(row) for row in range(len(texts))]
    logits = model.head(prefill(model, cache, texts, prefill_chunk))  # (B, V)
    rows = list(range(len(texts)))  # those that go on, in the order of the cache
    for step in range(1, max_new_tokens + 1):
        drawn = {
            row: sampling.draw(of_row, texts[row], generators[row]) for row, of_row in zip(rows, logits, strict=True)
        }
        drawn = {row: token for row, token in drawn.items() if token != end}
        for row, token in drawn.items():
            texts[row].append(token)
        yield drawn
        going = [row for row in drawn if len(texts[row]) <= config.max_seq_len and not ended(row)]
        if step == max_new_tokens or not going:
            return
        if len(going) < len(rows):
            cache.keep([rows.index(row) for row in going])
            rows = going
        newest = torch.tensor([[texts[row][-1]] for row in rows], device=parameter.device)
        logits = model(newest, cache.past(1))[:, -1]
        cache.advance([1] * len(rows))


def prefill(model: Transformer, cache: KVCache, texts: Sequence[Sequence[int]], chunk: int) -> Tensor:
    """Read prompts into an empty cache, a chunk of all rows at a time; what the head reads at their ends, `(B, D)`.

    Args:
        model: with `cache` made for it.
        cache: with a row for each of the prompts.
        texts: B prompts of any lengths, of at least one token.
        chunk: tokens of a row at a time. The sources of depth are `(B, chunk, D)`, whatever the length of the prompts.
    """
    longest, device = max(map(len, texts)), next(model.parameters()).device
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    ends: dict[int, Tensor] = {}
    for start in range(0, longest, chunk):
        piece = padded[:, start : start + chunk]
        features = model.features(piece, cache.past(piece.shape[1]))
        counts = [min(max(len(text) - start, 0), piece.shape[1]) for text in texts]
        ends |= {row: features[row, count - 1] for row, count in enumerate(counts) if count}
        cache.advance(counts)
    return torch.stack([ends[row] for row in range(len(texts))])


def _check(model: Transformer, texts: Sequence[Sequence[int]], max_new_tokens: int, prefill_chunk: int) -> None:
    """Raise the ValueErrors of `generate`."""
    config = model.config
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not texts:
        raise ValueError("there is no prompt")
    for row, text in enumerate(texts):
        which = f"prompt {row + 1} of {len(texts)}" if len(texts) > 1 else "the prompt"
        if not text:
            raise ValueError(f"{which} is empty: give it at least one token, such as the end of a document")
        if len(text) > config.max_seq_len:
            raise ValueError(f"{which} has {len(text)} tokens, more than max_seq_len={config.max_seq_len}: shorten it")
        if not 0 <= min(text) <= max(text) < config.vocab_size:
            raise ValueError(f"{which} holds the id {max(text, key=abs)}: the model knows 0 to {config.vocab_size - 1}")
