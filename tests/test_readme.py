"""What the README says is true: its commands run, its files exist, its strategy passes the contract."""

import re
import shlex
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from attnres_lit.cli import main
from attnres_lit.commands import COMMANDS as COMMANDS_WITHOUT_CONFIG
from attnres_lit.residual import Residual
from residual import test_contract as contract
from residual.models import VOCAB

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    python -m attnres_lit (.+)$", README, re.MULTILINE)
SMALL = [
    "--model.config.dim=8",
    "--model.config.num_layers=4",
    "--model.config.num_heads=1",
    "--data.seq_len=8",
    "--data.batch_size=4",
    "--trainer.limit_val_batches=2",
    "--trainer.val_check_interval=1",
    "--trainer.max_steps=2",
]


def test_every_command_works_as_written_one_after_the_other(tmp_path_factory, monkeypatch, capsys):
    """From the root of a copy of the repository; sizes are the only thing that is added."""
    root = tmp_path_factory.mktemp("clone")
    for folder in ("configs", "src"):
        shutil.copytree(ROOT / folder, root / folder)
    for page in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / page, root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        args = shlex.split(command)
        steps = 4 if "--ckpt_path" in args else 2
        small = (
            []
            if args[0] in ("consolidate", *COMMANDS_WITHOUT_CONFIG) or args[-1] in ("--help", "--print_config")
            else [*SMALL, f"--trainer.max_steps={steps}"]
        )
        if any(arg.startswith("configs/parallel/") for arg in args):  # it starts other processes by its own command
            done = subprocess.run([sys.executable, "-m", "attnres_lit", *args, *small], capture_output=True, text=True)
            code, error = done.returncode, done.stderr
        else:
            code, error = run(args + small, capsys)
        assert code == 0, (command, error[-500:])


def run(args, capsys):
    try:
        main(args)
    except SystemExit as exit:
        return exit.code, capsys.readouterr().err
    return 0, ""


def test_names_only_files_that_exist():
    for path in re.findall(r"\]\(([\w./-]+)\)|`((?:configs|src|tests|data|docs)/[\w./-]*)`", README):
        path = path[0] or path[1]
        if "scaled" not in path:
            assert (ROOT / path).exists(), path


def test_the_strategy_is_lint_clean(tmp_path):
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert source
    (tmp_path / "scaled.py").write_text(source[1])
    config = f"--config={ROOT / 'pyproject.toml'}"
    ruff = [sys.executable, "-m", "ruff"]
    for check in ([*ruff, "check", config, "scaled.py"], [*ruff, "format", "--check", config, "scaled.py"]):
        done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_is_short():
    assert len(README.splitlines()) < 200


@pytest.fixture
def own(monkeypatch):
    """The README's strategy, as a module of its own."""
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert source
    module = types.ModuleType("readme_strategy")
    monkeypatch.setitem(sys.modules, "readme_strategy", module)
    exec(source[1], module.__dict__)
    return next(s for s in vars(module).values() if isinstance(s, type) and s.__module__ == "readme_strategy")


def reference(residual, h, f):
    for site in range(residual.num_sites):
        h = h + residual.scale[str(site)] * f(site, h)
    return h


@pytest.mark.parametrize(("per_channel", "init"), [(False, 0.5), (True, 1.0)], ids=["rezero", "layerscale"])
@pytest.mark.parametrize("name", [name for name in dir(contract) if name.startswith("test_")])
def test_the_strategy_passes_the_contract(name, per_channel, init, own, monkeypatch):
    assert issubclass(own, Residual)
    monkeypatch.setitem(contract.REFERENCES, own, reference)
    tokens = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    more = (torch.float64, 1e-18, 1e-9) if name == "test_starts_as_prenorm_where_it_says_so" else ()
    getattr(contract, name)(partial(own, per_channel=per_channel, init=init), tokens, *more)


def test_the_strategy_trains_from_the_command_line(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small corpus\n" for i in range(400)))
    flags = ["--data.corpus=TextFiles", "--data.corpus.paths=[text.txt]", "--data.corpus.one_document_per=line"]
    config = str(ROOT / "configs/block.yaml")
    main(["fit", "--config", config, "--model.residual=readme_strategy.ScaledResidual", *flags, *SMALL])
    last = torch.load("runs/ScaledResidual/checkpoints/last.ckpt", weights_only=True)
    options = {"per_channel": False, "init": 0.0}
    assert last["hyper_parameters"]["residual"] == {
        "class_path": "readme_strategy.ScaledResidual",
        "init_args": options,
    }
