"""The command line on several processes: every layout from training to the sharing of its checkpoint, and mistakes.

The processes are forked (`world.py`) and find what a launcher would have put into the environment; `test_launch.py` has
real launchers.
"""

import csv
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from attnres_lit.cli import main
from attnres_lit.parallel.launch import Launcher
from parallel.faults import args
from parallel.world import on_ranks

PROCESSES = {None: 1, "ddp": 2, "fsdp": 2, "pipeline": 2, "interleaved": 2, "hybrid": 4}
OPTION = "--trainer.strategy.init_args."


pytestmark = pytest.mark.usefixtures("workdir")


def command(folder, arguments):
    """Run the command line in one of several processes; returns its exit code, and what it printed."""
    os.chdir(folder)
    sys.argv = ["attnres_lit"]
    with redirect_stdout(io.StringIO()) as printed:  # a forked process has the stdout of an earlier test
        try:
            main(arguments)
        except SystemExit as end:
            return end.code, printed.getvalue()
    return 0, printed.getvalue()


def run(subcommand, parallel, *flags, config="block"):
    """On one of the layouts; None is one process. Returns what the first process printed."""
    arguments = args(subcommand, parallel, "--trainer.enable_model_summary=false", *flags, config=config)
    alone = parallel is None
    done = [command(".", arguments)] if alone else on_ranks(PROCESSES[parallel], command, os.getcwd(), arguments)
    assert {code for code, _ in done} == {0}
    return done[0][1]


def fit(parallel, *flags, config="block"):
    run("fit", parallel, "--trainer.max_steps=3", "--trainer.val_check_interval=2", *flags, config=config)


def logged(name, version=0):
    """What a run wrote into its CSV file: the values of every metric by step."""
    with open(f"runs/{name}/csv/version_{version}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {key: {int(row["step"]): float(row[key]) for row in rows if row[key]} for key in rows[0]}


def assert_close(first, second):
    """All metrics of both that say what was learned."""
    names = [name for name in first if re.match(r"(train|val)/|grad_norm|lr|depth/(output|grad)", name)]
    assert {"train/loss", "val/loss", "grad_norm", "depth/output_rms/0", "depth/grad_norm/1"} <= set(names)
    for name in names:
        assert first[name] == pytest.approx(second[name], rel=2e-5), name


def validated(parallel, *flags):
    """The loss that `validate` prints."""
    printed = re.search(r"val/loss\s*│?\s*([\d.]+)", run("validate", parallel, *flags))
    assert printed
    return float(printed[1])


def test_a_pipeline_trains_as_one_device_and_shares_its_checkpoint():
    fit(None, "--name=alone")
    fit("interleaved", "--name=run")
    alone, pipeline = logged("alone"), logged("run")
    assert_close(alone, pipeline)
    assert min(pipeline["pipeline/bytes_sent"].values()) > 0
    events = EventAccumulator("runs/run", {"images": 0}).Reload()
    named = {"train/loss", "val/loss", "grad_norm", "pipeline/bytes_sent", "depth/output_rms/0", "depth/grad_norm/1"}
    assert named <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["depth/weights"]

    last = "runs/run/checkpoints/last.ckpt"
    assert Path(last).is_dir()
    main(["consolidate", last, "shared.ckpt"])
    scored = validated("pipeline", "--name=run", "--ckpt_path=last")
    assert scored == pytest.approx(validated(None, "--ckpt_path=shared.ckpt"), rel=1e-5)
    run("predict", "pipeline", "--name=run", "--ckpt_path=last", "--trainer.limit_predict_batches=2")
    predicted = torch.load("runs/run/predictions.pt", weights_only=True)
    run("predict", None, "--name=alone", "--ckpt_path=last", "--trainer.limit_predict_batches=2")
    torch.testing.assert_close(predicted, torch.load("runs/alone/predictions.pt", weights_only=True))

    fit(None, "--name=alone", "--ckpt_path=last", "--trainer.max_steps=5")
    fit("fsdp", "--name=run", "--ckpt_path=last", "--trainer.max_steps=5")
    assert set(logged("run", 1)["train/loss"]) == {3, 4}
    fit("pipeline", "--name=warm", f"--model.init_from={last}", "--trainer.max_steps=1")
    assert logged("warm")["train/loss"][0] < pipeline["train/loss"][0]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["block", "full", "denseformer", "mhc", "prenorm"])
@pytest.mark.parametrize("parallel", ["pipeline", "interleaved"])
def test_every_strategy_in_a_pipeline_as_on_one_device(parallel, config):
    fit(None, "--name=alone", config=config)
    fit(parallel, "--name=run", config=config)
    assert_close(logged("alone"), logged("run"))


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (["--trainer.gradient_clip_algorithm=value", "--trainer.gradient_clip_val=0.01"], "pipeline"),
        (["--trainer.accumulate_grad_batches=2", "--trainer.limit_train_batches=5"], "pipeline"),
        (["--trainer.overfit_batches=1"], "interleaved"),
        pytest.param(["--trainer.gradient_clip_algorithm=value"], "hybrid", marks=pytest.mark.slow),
        pytest.param(["--trainer.devices=1", OPTION + "num_microbatches=2"], "pipeline", marks=pytest.mark.slow),
    ],
)
def test_what_the_trainer_can_do_works_in_a_pipeline(flags, processes, monkeypatch):
    if "--trainer.devices=1" in flags:
        monkeypatch.setitem(PROCESSES, "pipeline", 1)
    fit(processes, "--name=run", *flags)
    if processes != "hybrid":  # its replicas read other batches
        fit(None, "--name=alone", *(flag for flag in flags if not flag.startswith(OPTION)))
        assert_close(logged("alone"), logged("run"))


def test_fast_dev_run_leaves_nothing():
    run("fit", "pipeline", "--trainer.fast_dev_run=2")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("parallel", "flags", "message"),
    [
        (
            "pipeline",
            ["--trainer.devices=5", OPTION + "num_microbatches=20", "--data.batch_size=20"],
            "fewer stages or",
        ),
        ("pipeline", ["--data.batch_size=6"], "num_microbatches=4 must divide the batch size, 6"),
        (
            "pipeline",
            [OPTION + "virtual_stages=2"],
            "1F1B has one stage a rank, virtual_stages=2: set it to 1",
        ),
        ("pipeline", [OPTION + "schedule=1f1b"], "unknown schedule '1f1b': known are GPipe"),
        ("pipeline", [OPTION + "cache_blocks=true"], "cache_blocks=true needs virtual_stages above 1"),
        ("interleaved", [OPTION + "cache_blocks=true", "--model.residual=PreNorm"], "has nothing to cache"),
        ("interleaved", ["--model.config.tie_embeddings=true"], "tied embeddings across stages: set tie_embeddings"),
        ("hybrid", [OPTION + "pipeline_parallel_size=3"], "must divide the number of processes, 4"),
        ("pipeline", [OPTION + "split_points=[9]"], "must be 1 increasing sites between 1 and 3"),
        ("pipeline", [OPTION + "timeout=0"], "timeout=0 must be above 0 seconds"),
        ("pipeline", ["--trainer.precision=16-mixed"], "does not support .*precision='16-mixed'"),
        ("fsdp", [OPTION + "data_parallel_size=3"], "data_parallel_size=3 must be the number of processes, 2, or null"),
    ],
)
def test_a_mistake_gets_one_line_before_any_process(parallel, flags, message, capfd, monkeypatch):
    monkeypatch.setattr(Launcher, "launch", None)
    with pytest.raises(SystemExit) as end:
        main(args("fit", parallel, *flags, config="block"))
    assert end.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert not Path("runs").exists()
