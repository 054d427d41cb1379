"""generate, evaluate and inspect as a user types them; a checkpoint alone is enough."""

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from attnres_lit.cli import main
from attnres_lit.parallel.checkpoint import read_full, write

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = [
    "--data.corpus=TextFiles",
    "--data.tokenizer=BPETokenizer",
    "--data.tokenizer.vocab_size=300",
    "--data.val_fraction=0.3",
    "--data.seq_len=16",
    "--data.batch_size=2",
    "--data.root=data",
    "--model.config.dim=16",
    "--model.config.num_layers=2",
    "--model.config.num_heads=2",
    "--model.config.max_seq_len=32",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--name=tiny",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint in a folder of its own, and the prepared corpus."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("".join(f"line {i} says näh to {i % 7} things\n" for i in range(400)))
    argv, sys.argv = sys.argv, ["attnres_lit"]
    try:
        corpus = [f"--data.corpus.paths=[{folder}/text.txt]", "--data.corpus.one_document_per=line"]
        main(["fit", "--config", str(CONFIGS / "block.yaml"), *TINY, *corpus, f"--data.dir={folder}/words",
              f"--runs_dir={folder}/runs"])  # fmt: skip
    finally:
        sys.argv = argv
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "runs/tiny/checkpoints/last.ckpt", alone / "model.ckpt")
    return alone / "model.ckpt", folder / "words"


def run(capfd, *args):
    capfd.readouterr()
    main([str(arg) for arg in args])
    return capfd.readouterr()


def fails(capfd, *args):
    """Exit code 2 and one line of error, which is returned."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([str(arg) for arg in args])
    assert exit.value.code == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


def test_generate(trained, capfd, monkeypatch, tmp_path):
    say = ["generate", "--ckpt_path", trained[0], "--max_new_tokens", 6]
    out, err = run(capfd, *say, "--prompt", "line 3 ")
    assert out.startswith("line 3 ")
    assert re.fullmatch(r"\[\d tokens: the first after [\d.]+ s, then \d+ tokens/s\]\n", err)
    assert run(capfd, *say, "--prompt", "line 3 ").out == out
    assert "trained on 16 tokens" in run(capfd, *say, "--prompt", "line 3 " * 8).err
    assert run(capfd, *say, "--prompt", "line 3 ", "--seed", 5).out != out
    (tmp_path / "prompt.txt").write_text("line 3 \n")
    assert run(capfd, *say, "--prompt-file", tmp_path / "prompt.txt").out == out
    monkeypatch.setattr("sys.stdin", io.StringIO("line 3 \n"))
    assert run(capfd, *say).out == out
    monkeypatch.setattr("sys.stdin", io.StringIO("line 3 \n\nline 3 \n"))
    assert run(capfd, *say, "--interactive").out == 2 * out.removeprefix("line 3 ")
    batch = run(capfd, *say, "--prompt=line 3 ", "--prompt=a", "--temperature=0").out
    alone = run(capfd, *say, "--prompt=line 3 ", "--temperature=0").out
    assert batch.startswith(f"==> 1 <==\n{alone}==> 2 <==\na")
    stop = run(capfd, *say, "--prompt=line 3 ", "--temperature=0", f"--stop={alone.strip()[-1]}").out
    assert stop == alone[: alone.index(alone.strip()[-1], 7)] + "\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_generate_from_a_folder_of_shards(trained, capfd, tmp_path):
    whole = read_full(trained[0])
    model = torch.nn.Module()
    model.state_dict = lambda: whole["state_dict"]
    write(tmp_path / "folder.ckpt", model, None, whole)
    say = ["--prompt", "line", "--max_new_tokens", 4]
    expected = run(capfd, "generate", "--ckpt_path", trained[0], *say).out
    assert run(capfd, "generate", "--ckpt_path", tmp_path / "folder.ckpt", *say).out == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt="], "the prompt is empty"),
        (["--prompt", "x " * 80], "more than max_seq_len=32"),
        (["--prompt=a", "--temperature=-1"], "temperature=-1"),
        (["--prompt=a", "--top_p=0"], "top_p=0"),
        (["--prompt=a", "--top_k=0"], "top_k=0"),
        (["--prompt=a", "--max_new_tokens=0"], "max_new_tokens=0"),
        (["--prompt=a", "--max_new_tokens=many"], "invalid int value: 'many'"),
        (["--prompt=a", "--stop="], "stop text is empty"),
        (["--prompt=a", "--interactive"], "leave --prompt"),
        (["--prompt_file=nowhere"], "--prompt_file nowhere cannot be read"),
        (["--prompt=a", "--temprature=1"], "did you mean temperature?"),
        (["--prompt=a", "--device=abacus"], "--device abacus"),
        (["--prompt=a", "--num_threads=0"], "--num_threads 0"),
    ],
)
def test_generate_refuses(trained, capfd, args, message):
    assert message in fails(capfd, "generate", "--ckpt_path", trained[0], *args)


def test_refuses_a_checkpoint(trained, capfd, tmp_path):
    assert "required: --ckpt_path" in fails(capfd, "generate", "--prompt=a")
    generate = ["generate", "--prompt=a", "--ckpt_path"]
    assert "there is no" in fails(capfd, *generate, "nowhere.ckpt")
    (tmp_path / "text").write_text("no checkpoint")
    assert "not a checkpoint" in fails(capfd, *generate, tmp_path / "text")
    cut = trained[0].read_bytes()
    (tmp_path / "cut").write_bytes(cut[: len(cut) // 2])
    assert "damaged" in fails(capfd, *generate, tmp_path / "cut")
    whole = torch.load(trained[0], weights_only=True)
    for changed, message in (
        ({"TokenDataModule": {}}, "holds no tokenizer"),
        ({"hyper_parameters": {}}, "does not say which model"),
        ({"state_dict": {}}, "does not fit"),
        (
            {"hyper_parameters": whole["hyper_parameters"] | {"residual": {"class_path": "os.system"}}},
            "os.system of the checkpoint cannot be imported",
        ),
    ):
        torch.save(whole | changed, tmp_path / "changed")
        assert message in fails(capfd, *generate, tmp_path / "changed")


def test_evaluate(trained, capfd):
    checkpoint, words = trained
    out = run(capfd, "evaluate", "--ckpt_path", checkpoint, "--data_dir", words, "--stride", 4, "--limit", 20).out
    found = dict(line.split() for line in out.splitlines())
    assert found["documents"] == "20"
    assert float(found["bpb"]) > 1
    for args, message in (
        (["--data_dir", "nowhere"], "nowhere does not exist"),
        (["--data_dir", words, "--window", 33], "max_seq_len=32"),
        (["--data_dir", words, "--stride", 17], "between 1 and window=16"),
        (["--data_dir", words, "--split", "test"], "train and val"),
        ([], "--data_dir"),
    ):
        assert message in fails(capfd, "evaluate", "--ckpt_path", checkpoint, *args)


def test_inspect(trained, capfd, tmp_path):
    out = run(capfd, "inspect", "--ckpt_path", trained[0], "--out", tmp_path / "seen", "--prompt", "line <3>").out
    assert re.search(r"residual +\d+ +[\d.]+%", out)
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == [
        "depth_weights.png", "depth_weights_per_token.png", "index.html", "output_rms.png",
    ]  # fmt: skip
    assert "line &lt;3&gt;" in (tmp_path / "seen/index.html").read_text()
    (tmp_path / "taken").write_text("")
    assert "cannot be written" in fails(capfd, "inspect", "--ckpt_path", trained[0], "--out", tmp_path / "taken")
