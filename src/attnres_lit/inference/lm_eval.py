"""The tasks of EleutherAI's lm-eval, run on a model of this package. Needs the extra `eval`."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from attnres_lit.data.tokenizers import Tokenizer
from attnres_lit.inference.generate import stream
from attnres_lit.inference.sampling import Sampling
from attnres_lit.inference.scoring import scores
from attnres_lit.inference.text import Reply
from attnres_lit.model import Transformer

MAX_NEW_TOKENS = 256  # where a task does not say


class Harness(TemplateLM):
    """What lm-eval asks a model: how likely a continuation or a whole text is, and to continue a text.

    A text that has nothing before it follows the end of a document.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        batch_size: requests that are answered at a time.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch_size: int = 8) -> None:
        super().__init__()
        self.model = model
        self.text = tokenizer
        self.batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self.text.eod

    @property
    def max_length(self) -> int:
        """Tokens that the model can read."""
        return self.model.config.max_seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; there are none to add."""
        return self.text.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in nats; long ones in windows that count every token once."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            totals.append(sum(score for score, _ in self._scores([make_disjoint_window(each) for each in windows])))
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until one of the task's stops, or until they are long enough."""
        asked: list[tuple[Any, ...]] = [request.args for request in requests]
        options = [_options(how) for _, how in asked]
        order = sorted(range(len(requests)), key=lambda i: repr(options[i]))
        texts: dict[int, str] = {}
        for _, alike in groupby(order, key=lambda i: repr(options[i])):
            same = list(alike)
            for first in range(0, len(same), self.batch_size):
                some = same[first : first + self.batch_size]
                prompts = [asked[i][0] for i in some]
                texts |= dict(zip(some, self._continue(prompts, *options[some[0]]), strict=True))
        return [texts[i] for i in range(len(requests))]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        return [tuple(score) for score in scores(self.model, pairs, self.batch_size)]

    def _continue(self, prompts: Sequence[str], stop: list[str], limit: int, temperature: float) -> list[str]:
        """The newest tokens of each prompt are read, as many as leave room for the answer."""
        limit = min(limit, self.max_length - 1)
        ids = [(self.tok_encode(prompt) or [self.eot_token_id])[limit - self.max_length :] for prompt in prompts]
        replies, texts = [Reply(self.text, each, stop) for each in ids], [""] * len(ids)
        ended: Callable[[int], bool] = lambda row: replies[row].stopped  # noqa: E731 - typed
        for step in stream(self.model, ids, limit, Sampling(temperature), self.eot_token_id, ended=ended):
            for row, token in step.items():
                texts[row] += replies[row].add(token)
        return [text + reply.close() for text, reply in zip(texts, replies, strict=True)]


def _options(asked: dict[str, Any]) -> tuple[list[str], int, float]:
    """Stops, the longest answer and the temperature of a request for text."""
    until = asked.get("until") or []
    stop = [until] if isinstance(until, str) else [each for each in until if each]
    limits = [asked[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if asked.get(name)]
    sampled = asked.get("do_sample", False)
    return stop, int((limits or [MAX_NEW_TOKENS])[0]), float(asked.get("temperature") or 1.0) if sampled else 0.0


def run_tasks(
    model: Transformer,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    folder: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Run tasks.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        tasks: their names.
        folder: where tasks of one's own are defined, in YAML files as lm-eval has them; then only those are known.
        num_fewshot: examples before each request; None: as the task says.
        limit: requests of each task, the first ones; None: all.
        batch_size: requests that are answered at a time.

    Returns:
        What lm-eval returns: the metrics of each task are under "results".

    Raises:
        ValueError: an unknown task, or no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder} of tasks")
    manager = TaskManager() if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    known = set(manager.all_tasks)
    if unknown := [name for name in tasks if name not in known]:
        own = ", ".join(sorted(known)) or "none"
        where = "`lm-eval ls tasks` lists them" if folder is None else f"{folder} has {own}"
        raise ValueError(f"unknown task {', '.join(unknown)}: {where}")
    found = simple_evaluate(
        Harness(model, tokenizer, batch_size),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None  # which it is on the first of several processes, and there is one
    return dict(found)
