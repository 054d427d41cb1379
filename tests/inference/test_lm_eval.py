"""Scores of continuations; and lm-eval itself on tasks that are defined by local files, without a network."""

import json
import math
import sys
from dataclasses import asdict

import pytest
import torch

from attnres_lit.cli import main
from attnres_lit.data.tokenizers import ByteTokenizer, pack
from attnres_lit.inference.scoring import scores
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.residual import BlockAttnRes
from attnres_lit.training.hparams import describe
from test_cli import fails

TOKENIZER = ByteTokenizer()
SHARED = """
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
metadata: {version: 1.0}
"""
TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "whole_text": """
task: whole_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "answers": """
task: answers
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["\\\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(vocab_size=257, dim=32, num_layers=2, max_seq_len=48), BlockAttnRes).eval()


def log_likelihood(model, context, continuation):
    """One token at a time, from an uncached forward of its own."""
    ids, total = list(context), 0.0
    for token in continuation:
        with torch.inference_mode():
            logits = model(torch.tensor([ids[-48:]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        ids.append(token)
    return total


def test_scores_are_sums_over_the_tokens_of_a_continuation(model):
    texts = [("a", "bc"), ("a longer context", " and its continuation"), ("x", ""), ("q", "z")]
    pairs = [(TOKENIZER.encode(a).tolist(), TOKENIZER.encode(b).tolist()) for a, b in texts]
    for batch_size in (1, 3):
        found = scores(model, pairs, batch_size)
        for (context, continuation), score in zip(pairs, found, strict=True):
            assert score.log_likelihood == pytest.approx(log_likelihood(model, context, continuation), abs=1e-4)
    best = int(model(torch.tensor([[65]]))[0, -1].argmax())
    assert [score.greedy for score in scores(model, [([65], [best]), ([65], [best - 1])])] == [True, False]


def test_of_a_long_context_the_newest_tokens_are_read(model):
    text = list(range(100))
    assert scores(model, [(text, [7])]) == scores(model, [(text[-48:], [7])])
    with pytest.raises(ValueError, match="a continuation of 49 tokens exceeds max_seq_len=48"):
        scores(model, [([1], [0] * 49)])
    with pytest.raises(ValueError, match="a context is empty"):
        scores(model, [([], [1])])


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with the three kinds of task, whose right answers are those of the model."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write(folder, documents):
    (folder / "data.json").write_text("\n".join(map(json.dumps, documents)))
    for name, task in TASKS.items():
        shared = SHARED.replace("DATA", str(folder / "data.json"))
        (folder / f"{name}.yaml").write_text(task + shared)


def test_lm_eval_gets_the_numbers_of_the_model(model, tasks):
    from attnres_lit.inference.generate import generate
    from attnres_lit.inference.lm_eval import run_tasks
    from attnres_lit.inference.sampling import Sampling

    long = "the cat and the hat, and a text that is longer than the context of the model is"
    questions = ["def f(x):", long, "import"]
    choices = [" one", " two", " three"]
    documents = []
    for question in questions:
        ids = TOKENIZER.encode(question).tolist()
        likely = [log_likelihood(model, ids, TOKENIZER.encode(choice).tolist()) for choice in choices]
        answer = max(range(3), key=likely.__getitem__)
        (reply,) = generate(model, [ids[-43:]], 5, Sampling(0.0), TOKENIZER.eod)
        reply = TOKENIZER.decode(reply).split("\n")[0]
        documents.append({"question": question, "choices": choices, "answer": answer, "reply": reply})
    write(tasks, documents)
    found = run_tasks(model, TOKENIZER, list(TASKS), tasks)["results"]
    assert found["choices"]["acc,none"] == 1.0
    assert found["answers"]["exact_match,none"] == 1.0
    nats = size = 0
    for question in questions:
        ids = TOKENIZER.encode(question).tolist()
        size += len(ids)
        nats -= log_likelihood(model, [TOKENIZER.eod], ids[:48])
        nats -= log_likelihood(model, ids[:48][len(ids) - 48 - 49 :], ids[48:])
    assert found["whole_text"]["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=1e-3)
    with pytest.raises(ValueError, match=r"unknown task nothing: .* has answers, choices, whole_text"):
        run_tasks(model, TOKENIZER, ["nothing"], tasks)
    with pytest.raises(ValueError, match="there is no folder"):
        run_tasks(model, TOKENIZER, ["choices"], tasks / "nowhere")


@pytest.fixture
def checkpoint(model, tmp_path):
    """What `fit` writes of the model."""
    path = tmp_path / "last.ckpt"
    torch.save(
        {
            "pytorch-lightning_version": "2.6",
            "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
            "hyper_parameters": {"config": asdict(model.config), "residual": describe(BlockAttnRes)},
            "TokenDataModule": {"tokenizer": pack(TOKENIZER), "seq_len": 16},
        },
        path,
    )
    return str(path)


def test_on_the_command_line(tasks, checkpoint, capsys):
    write(tasks, [{"question": "import", "choices": ["a", "b"], "answer": 0, "reply": "x"}] * 3)
    main(["evaluate", "--ckpt_path", checkpoint, "--tasks", "choices,answers", "--tasks_dir", str(tasks), "--limit=2"])
    out = capsys.readouterr().out
    assert "|choices|" in out
    assert "exact_match" in out


def test_without_lm_eval_it_says_what_to_install(checkpoint, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.utils", raising=False)
    line = fails(capfd, "evaluate", "--ckpt_path", checkpoint, "--tasks", "choices")
    assert "--tasks needs lm-eval" in line
    assert "pip install 'attnres_lit[eval]'" in line
    assert "one of --data_dir and --tasks" in fails(capfd, "evaluate", "--ckpt_path", checkpoint)
