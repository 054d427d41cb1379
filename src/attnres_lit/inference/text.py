"""Generation of text: prompts in, pieces of their continuations out, as soon as they are certain."""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from attnres_lit.data.tokenizers import Tokenizer
from attnres_lit.inference.generate import PREFILL_CHUNK, stream
from attnres_lit.inference.sampling import Sampling
from attnres_lit.model import Transformer

CONTEXT = 8  # tokens before a new one that may change how it is spelt
UNFINISHED = "\ufffd"  # what the bytes of a character decode to before the last of them is there
LONGEST = 4  # bytes of a character


class Reply:
    """The text of one row while it grows.

    Args:
        tokenizer: spells the tokens.
        prompt: ids before the reply.
        stop: texts that end it and are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self._context = list(prompt)[-CONTEXT:]
        self._pending: list[int] = []  # tokens that end within a character
        self._held = ""  # text that may turn out to begin a stop

    def add(self, token: int) -> str:
        """One more token; the text that is now certain."""
        self._pending.append(token)
        before = self.tokenizer.decode(self._context)
        text = self.tokenizer.decode([*self._context, *self._pending])
        new = text[len(before) :] if text.startswith(before) else self.tokenizer.decode(self._pending)
        if new.endswith(UNFINISHED) and len(self._pending) < LONGEST:
            return ""
        self._context, self._pending = [*self._context, *self._pending][-CONTEXT:], []
        return self._release(new)

    def close(self) -> str:
        """The rest, once the row has ended."""
        rest = self.tokenizer.decode(self._pending) if self._pending and not self.stopped else ""
        held, self._pending, self._held = self._held, [], ""
        return "" if self.stopped else held + rest

    def _release(self, new: str) -> str:
        text = self._held + new
        at = min((text.find(each) for each in self.stop if each in text), default=-1)
        if at >= 0:
            self.stopped, self._held = True, ""
            return text[:at]
        begun = (n for each in self.stop for n in range(1, len(each)) if text.endswith(each[:n]))
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]


class Step(NamedTuple):
    """What a step of generation adds."""

    text: dict[int, str]  # by row
    tokens: int  # of all rows


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop: Sequence[str] = (),
    prefill_chunk: int = PREFILL_CHUNK,
) -> Generator[Step]:
    """Continue prompts side by side.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        prompts: not empty.
        max_new_tokens: tokens of a continuation at most; it also ends with the document, or at `max_seq_len`.
        sampling: how tokens are drawn.
        stop: texts that end a continuation and are not part of it.
        prefill_chunk: tokens of the prompts that are read at a time.

    Yields:
        What has become certain after every step, and at last what a row still held back.

    Raises:
        ValueError: an empty stop; as `generate`.
    """
    if "" in stop:
        raise ValueError("a stop text is empty: give it at least one character")
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    replies = [Reply(tokenizer, each, stop) for each in ids]
    for step in stream(
        model, ids, max_new_tokens, sampling, tokenizer.eod, prefill_chunk, lambda row: replies[row].stopped
    ):
        yield Step({row: replies[row].add(token) for row, token in step.items()}, len(step))
    yield Step({row: reply.close() for row, reply in enumerate(replies)}, 0)
