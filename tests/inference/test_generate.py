"""Generation: the cache changes nothing, rows do not see one another, and rows end where they should."""

import random

import pytest
import torch

from attnres_lit.inference import Sampling, generate, stream
from attnres_lit.inference.generate import prefill
from attnres_lit.model.kv_cache import KVCache
from attnres_lit.model.recompute import Recompute
from residual.models import CONFIGS, VOCAB, build, factory_from_yaml, scatter

GREEDY = Sampling(temperature=0)
EVERY = sorted(CONFIGS.glob("*.yaml"))


def model_of(path, dtype=torch.float32, **config):
    return scatter(build(factory_from_yaml(path), dtype, max_seq_len=48, **config)).eval()


@pytest.fixture(scope="module")
def block():
    return model_of(CONFIGS / "block.yaml")


def drawn(rng, count, longest):
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def uncached(model, text, new):
    """Greedy tokens and the logits each was chosen from, by a whole forward a token."""
    text, rows = list(text), []
    for _ in range(new):
        with torch.no_grad():
            rows.append(model(torch.tensor([text]))[0, -1])
        text.append(int(rows[-1].argmax()))
    return text[len(text) - new :], torch.stack(rows)


def cached(model, texts, chunk, tokens):
    """The logits from which each row chooses its next token, while it is given `tokens`: `(B, new, V)`."""
    cache = KVCache(model.config, len(texts), 48, next(model.parameters()).dtype, torch.device("cpu"))
    with torch.inference_mode():
        logits = [model.head(prefill(model, cache, texts, chunk))]
        for step in torch.tensor(tokens)[:, :-1].T:
            logits.append(model(step[:, None], cache.past(1))[:, -1])
            cache.advance([1] * len(texts))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_uncached_forward_for_any_batch_and_chunks(path, seed):
    rng = random.Random(f"{path.stem} {seed}")
    heads = rng.choice([{"num_heads": 2}, {"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 2, "num_kv_heads": 1}])
    model = model_of(path, dim=16, num_layers=rng.choice([4, 6]), **heads)
    texts, new, chunk = drawn(rng, rng.randint(1, 4), 30), rng.randint(1, 8), rng.randint(1, 34)
    expected, logits = zip(*(uncached(model, text, new) for text in texts), strict=True)
    assert generate(model, texts, new, GREEDY, prefill_chunk=chunk) == list(expected)
    torch.testing.assert_close(cached(model, texts, chunk, expected), torch.stack(logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("again", [True, "read"])
def test_what_backward_would_recompute_does_not_matter(block, again, monkeypatch):
    text = drawn(random.Random(0), 2, 9)
    expected = generate(block, text, 6, GREEDY)
    monkeypatch.setattr(block, "recompute", Recompute(again))
    assert generate(block, text, 6, GREEDY) == expected


def test_in_half_precision():
    model = model_of(CONFIGS / "block.yaml", torch.bfloat16)
    assert len(generate(model, [[1, 2, 3]], 4, GREEDY)[0]) == 4
    text, new = [[1, 2, 3]], 1
    logits = cached(model, text, 2, [[0] * new])
    with torch.inference_mode():
        whole = model(torch.tensor(text))[:, -1:]
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, whole, rtol=0.05, atol=0.1)


def test_a_row_draws_the_same_whatever_the_others_are(block):
    texts, sampling = drawn(random.Random(1), 3, 12), Sampling(seed=7)
    together = generate(block, texts, 12, sampling)
    assert together[0] == generate(block, texts[:1], 12, sampling)[0]
    assert together[2] == generate(block, texts[2:], 12, Sampling(seed=9))[0]
    assert generate(block, [texts[0]] * 2, 12, sampling)[0] != generate(block, [texts[0]] * 2, 12, sampling)[1]


def test_a_row_ends_alone_with_the_document(block):
    texts = drawn(random.Random(2), 3, 12)
    free = generate(block, texts, 10, GREEDY)
    end = free[1][3]  # a token that row 1 comes to
    expected = [row[: row.index(end)] if end in row else row for row in free]
    assert generate(block, texts, 10, GREEDY, end=end) == expected
    assert len(expected[1]) <= 3


def test_a_row_ends_where_the_context_does(block):
    long, short = [1] * 45, [2, 3]
    rows = generate(block, [long, short], 10, GREEDY)
    assert [len(row) for row in rows] == [4, 10]
    assert rows[1] == generate(block, [short], 10, GREEDY)[0]
    assert len(generate(block, [[1] * 48], 10, GREEDY)[0]) == 1  # the token after the last that it can read


def test_rows_end_when_they_are_told_to(block):
    steps = list(stream(block, [[1], [2, 3]], 6, GREEDY, ended=lambda row: row == 0))
    assert [sorted(step) for step in steps] == [[0, 1], *[[1]] * 5]


def test_the_sources_of_a_prompt_are_alive_a_chunk_at_a_time(block):
    seen, write = [], block.residual.write

    def watch(sources, output, site, note):
        seen.append(output.shape[1])
        return write(sources, output, site, note)

    block.residual.write = watch
    try:
        generate(block, [[1] * 40], 1, GREEDY, prefill_chunk=16)
    finally:
        del block.residual.write
    assert set(seen) == {16, 8}


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([[]], {}, "empty"),
        ([[1], []], {}, "prompt 2 of 2 is empty"),
        ([], {}, "no prompt"),
        ([[1] * 49], {}, "49 tokens, more than max_seq_len=48"),
        ([[1, VOCAB]], {}, f"the id {VOCAB}"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0"),
    ],
)
def test_refuses(block, texts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(block, texts, **options)
