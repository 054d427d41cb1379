"""`attnres_lit sweep`: real runs, one that fails, one that is stopped; the presets; what is refused."""

import csv
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml

from attnres_lit.cli import main
from attnres_lit.experiments import sweep
from attnres_lit.experiments.cells import SEED, Sweep, read_sweep
from attnres_lit.experiments.sweep import Job, done, run
from attnres_lit.sweeping import Reader, costs

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = [path for path in sorted(CONFIGS.glob("experiment/*.yaml")) if "axes" in yaml.safe_load(path.read_text())]
BASE = {
    "trainer": {
        "limit_val_batches": 3,
        "log_every_n_steps": 1,
        "callbacks": [
            {
                "class_path": "attnres_lit.training.callbacks.LastCheckpoint",
                "init_args": {"dirpath": "{run}/checkpoints", "every_n_steps": 5},
            }
        ],
    },
    "data": {
        "corpus": {"class_path": "TextFiles", "init_args": {"paths": ["corpus/*.txt"]}},
        "val_fraction": 0.3,
        "seq_len": 16,
        "batch_size": 4,
    },
    "model": {"config": {"dim": 16, "num_layers": 2, "num_heads": 2}},
}
CELLS = {
    "plain": {"model.residual": str(CONFIGS / "residual/prenorm.yaml")},
    "broken": {"data.corpus.paths": ["missing/*.txt"]},  # found out when it runs
    "block": {"model.residual.num_blocks": 2},
}
STEPS, VALIDATIONS = 120, 6


def prepare(folder, cells, steps=STEPS):
    """A folder with a corpus, a base config and a sweep of these cells."""
    (folder / "corpus").mkdir()
    for number in range(12):
        text = f"def f{number}(x):\n    return x + {number}\n" * 40
        (folder / f"corpus/{number}.txt").write_text(text)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    said = {"config": [str(CONFIGS / "block.yaml"), "base.yaml"], "axes": {"model": cells}}
    said["budget"] = {"steps": steps, "validations": VALIDATIONS}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(said, sort_keys=False))


def start(*flags):
    """A sweep in a process of its own."""
    command = [sys.executable, "-m", "attnres_lit", "sweep", "sweep.yaml", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def here(*args):
    """A command in this process: its exit code, and what it says."""
    code, said = 0, StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(list(args))
        except SystemExit as exit:
            code = exit.code
    return code, said.getvalue()


def children(process):
    """Of a sweep: its runs."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def running(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def uninterrupted(name, cell, steps=STEPS):
    """The `fit` that a cell is, in this process."""
    flags = [f"--{key}={value}" for key, value in cell.items()]
    flags += [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps // VALIDATIONS}"]
    flags += [f"--model.optim.total_steps={steps}", f"--model.optim.warmup_steps={steps // 10}"]
    configs = ["--config", str(CONFIGS / "block.yaml"), "--config", "base.yaml"]
    code, said = here("fit", *configs, *flags, "--runs_dir=whole", f"--name={name}")
    assert code == 0, said


def end(folder):
    """Of a run: the weights, and the last validation loss."""
    weights = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    versions = sorted((folder / "csv").iterdir(), key=lambda path: int(path.name.removeprefix("version_")))
    rows = [row for path in versions for row in csv.DictReader((path / "metrics.csv").open())]
    return weights, [(row["step"], row["val/loss"]) for row in rows if row["val/loss"]][-1]


def assert_same_end(one, other):
    (weights, loss), (expected, expected_loss) = end(one), end(other)
    assert loss == expected_loss
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of three cells that was stopped once, and then ran to its end: what was seen on the way."""
    folder, before = tmp_path_factory.mktemp("swept"), Path.cwd()
    os.chdir(folder)
    argv, sys.argv = sys.argv, ["attnres_lit"]
    try:
        prepare(folder, CELLS)
        process = start("--jobs=2")
        first, deadline = folder / "runs/sweep/plain/checkpoints/last.ckpt", time.monotonic() + 240
        while not first.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        runs = children(process)
        process.terminate()
        stopped = {"code": process.wait(), "runs": runs, "left": running(runs), "step": done(first.parents[1])}
        code, said = here("sweep", "sweep.yaml", "--jobs=2")
        yield {"folder": folder, "stopped": stopped, "code": code, "said": said}
    finally:
        os.chdir(before)
        sys.argv = argv


@pytest.fixture
def folder(swept, monkeypatch):
    """Where the sweep is, as the current folder."""
    monkeypatch.chdir(swept["folder"])
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    return swept["folder"]


def test_stopped_it_ends_its_runs(swept):
    stopped = swept["stopped"]
    assert stopped["code"] == 128 + signal.SIGTERM
    assert len(stopped["runs"]) == 2
    assert stopped["left"] == []
    assert 0 < stopped["step"] < STEPS


def test_a_cell_that_fails_is_reported_and_the_others_go_on(swept, folder):
    assert swept["code"] == 2
    assert "failed: broken: no files match 'missing/*.txt'" in swept["said"]
    assert "(exit code 2; see runs/sweep/logs/broken.log)" in swept["said"]
    assert "runs/sweep: 2 of 3 cells are finished" in swept["said"]
    assert "error: 1 failed: broken; the same command tries them again" in swept["said"]
    assert not (folder / "runs/sweep/broken").exists()


@pytest.mark.parametrize("name", ["plain", "block"])
def test_a_cell_is_the_fit_that_was_never_interrupted(name, folder):
    uninterrupted(name, CELLS[name])
    assert (folder / "runs/sweep" / name / "config.yaml").is_file()
    assert_same_end(folder / "runs/sweep" / name, folder / "whole" / name)


def test_what_is_finished_is_not_trained_again(folder):
    files = {path: path.stat().st_mtime_ns for path in folder.glob("runs/sweep/*/checkpoints/*")}
    code, said = here("sweep", "sweep.yaml", "--cells", "2", "0")
    assert (code, said.splitlines()[-1]) == (0, "runs/sweep: 2 of 2 cells are finished")
    assert files == {path: path.stat().st_mtime_ns for path in folder.glob("runs/sweep/*/checkpoints/*")}


def test_a_dry_run_prints_the_cells_and_their_state(folder):
    code, said = here("sweep", "sweep.yaml", "--dry_run", "--jobs=2")
    assert code == 0
    lines = [line for line in said.splitlines() if line.startswith(("plain", "broken", "block", "3 cells"))]
    assert [line.split()[0] for line in lines] == [*CELLS, "3"]
    assert [line.split()[-1] for line in lines[:3]] == ["finished", "new", "finished"]
    parameters = sum(weight.numel() for weight in end(folder / "runs/sweep/plain")[0].values())
    assert lines[0].split()[1:4] == [f"{parameters:,}", str(STEPS), f"{STEPS * 4 * 16:.3g}"]
    assert "with --jobs 2" in lines[3]


def test_a_job_array_has_a_task_for_each_cell(folder, monkeypatch):
    """The script, with an `echo` for Python: what it says is a command that works."""
    monkeypatch.setattr(sys, "executable", "echo")
    code, said = here("sweep", "sweep.yaml", "--slurm", "--cells", "0", "2")
    assert (code, said.splitlines()[-1]) == (0, "sbatch runs/sweep/sweep.sbatch")
    assert "#SBATCH --array=0,2\n" in (folder / "runs/sweep/sweep.sbatch").read_text()
    task = {**os.environ, "SLURM_ARRAY_TASK_ID": "2"}
    ran = subprocess.run(["bash", "runs/sweep/sweep.sbatch"], env=task, capture_output=True, text=True, check=True)
    words = ran.stdout.split()
    assert words[:2] == ["-m", "attnres_lit"]
    assert words[-2:] == ["--cells", "2"]
    code, said = here(*words[2:])
    assert (code, said.splitlines()[-1]) == (0, "runs/sweep: 1 of 1 cells are finished")


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"budget": {"steps": 60}}, [], "cell plain: runs/sweep/plain holds a run with model.optim.total_steps=120, "),
        ({"set": {"model.optim.lr": 1.0e-4}}, [], "with model.optim.lr=0.003, not 0.0001: choose another --runs_dir"),
        ({"set": {"model.config.dmi": 8}}, [], "cell plain: .*model.config.dmi.*; did you mean model.config.dim"),
        (
            {"axes": {"a": {"b": {"model.optim.lrr": 1}}}},
            [],
            "cell b: .*model.optim.lrr.*; did you mean model.optim.lr",
        ),
        ({"axes": {"model.config.dim": ["wide"]}}, [], "cell dim=wide: .*model.config.dim"),
        ({"axes": {"model.config.num_heads": [2, 3]}}, [], "cell num_heads=3: dim=16 must be an even multiple"),
        ({"axes": {"trainer.max_steps": [5, 6]}}, [], "cell max_steps=5: trainer.max_steps is set by the sweep"),
        ({"set": {"name": "mine"}}, [], "cell plain: name is set by the sweep"),
        ({}, ["--cells", "3"], "--cells 3: the cells are 0 to 2"),
        ({}, ["--jobs", "0"], "--jobs 0 must be at least 1"),
        ({}, ["--job", "2"], "did you mean jobs"),
    ],
)
def test_a_mistake_gets_one_line(changes, flags, message, folder):
    said = yaml.safe_load((folder / "sweep.yaml").read_text()) | changes
    (folder / "changed.yaml").write_text(yaml.safe_dump(said, sort_keys=False))
    code, said = here("sweep", "changed.yaml", "--runs_dir=runs/sweep", "--dry_run", *flags)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) == (2, 1)
    assert re.search(message, errors[0]), errors[0]


def test_a_cell_that_another_process_has_taken_is_waited_for(folder, tmp_path, monkeypatch):
    """It takes the cell while this sweep's run starts, and finishes it."""
    checkpoint, started = folder / "runs/sweep/plain/checkpoints/last.ckpt", []
    other = f"""
import pathlib, shutil, time
from filelock import FileLock
with FileLock("{tmp_path}/.plain.lock"):
    print("taken", flush=True)
    time.sleep(1.5)
    pathlib.Path("{tmp_path}/plain/checkpoints").mkdir(parents=True)
    shutil.copy("{checkpoint}", "{tmp_path}/plain/checkpoints/last.ckpt")
"""

    def command(job, runs_dir):
        started.append(subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE))
        started[0].stdout.readline()
        return [sys.executable, "-c", "raise SystemExit('error: it is taken')"]

    monkeypatch.setattr(sweep, "command", command)
    assert run([Job("plain", [], STEPS)], tmp_path, 1) == {}
    assert len(started) == 1
    assert started[0].wait() == 0


@pytest.mark.parametrize(
    "path",
    [pytest.param(each, marks=pytest.mark.slow if each.stem == "architecture" else ()) for each in PRESETS],
    ids=lambda path: path.stem,
)
def test_every_preset_builds(path, tmp_path, monkeypatch):
    """Enough of its cells that every option of every axis is among them; seeds aside."""
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    if "fineweb_edu" in path.read_text() and not (CONFIGS / "data/fineweb_edu.yaml").exists():
        pytest.skip("its data config is not there")
    whole, seen, chosen = read_sweep(path), set(), []
    for cell in whole.cells:
        options = {(key, str(value)) for key, value in cell.settings.items() if key != SEED}
        if not options <= seen:
            chosen.append(cell)
            seen |= options
    found = costs(Sweep(whole.configs, chosen), tmp_path, Reader())
    assert [each.job.name for each in found] == [cell.name for cell in chosen]
    assert all(each.flops > 0 and each.job.steps > 0 for each in found)
    said = path.read_text().splitlines()
    assert any(f"{len(whole.cells)} cells" in line for line in said if line.startswith("#")), "its header counts them"


@pytest.mark.slow
def test_killed_eight_times_it_ends_as_if_never(tmp_path, monkeypatch):
    """At random moments: the sweep with its runs, the sweep alone, whose runs go on, or as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    cells, steps = {"plain": CELLS["plain"], "block": CELLS["block"]}, 1200
    prepare(tmp_path, cells, steps)
    draw, every = random.Random(0), []
    for how in ("all", "alone", signal.SIGTERM, signal.SIGINT) * 2:
        process = start("--jobs=2")
        deadline = time.monotonic() + draw.uniform(8, 40)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        runs = children(process)
        every += runs
        process.send_signal(how if isinstance(how, signal.Signals) else signal.SIGKILL)
        process.wait()
        for pid in running(runs) if how == "all" else ():
            os.kill(pid, signal.SIGKILL)
        if how != "alone":
            assert running(runs) == []
    code, said = here("sweep", "sweep.yaml", "--jobs=2")
    assert code == 0, said
    assert running(every) == []
    for name, cell in cells.items():
        uninterrupted(name, cell, steps)
        assert_same_end(tmp_path / "runs/sweep" / name, tmp_path / "whole" / name)
