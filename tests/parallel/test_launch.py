"""The command line starts and joins processes: `python -m` starts its own, torchrun's are taken as they are."""

import csv
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_lit.cli import CLI, main
from parallel import faults
from parallel.faults import ALONE, torchrun

FEW = [
    "--trainer.limit_val_batches=3",
    "--trainer.val_check_interval=2",
    "--trainer.max_steps=3",
    "--trainer.enable_model_summary=false",
]
TORCHRUN = torchrun(2)

pytestmark = pytest.mark.usefixtures("workdir")


def args(parallel, *flags):
    return faults.args("fit", parallel, *FEW, f"--name={parallel}", *flags)


def launch(launcher, parallel, *flags):
    """Train in processes of their own, and return the losses of training and validation that were logged."""
    command = [sys.executable, *launcher, "attnres_lit", *args(parallel, *flags)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return losses(parallel)


def losses(name):
    """Of training and validation, and the norms of the gradient."""
    with open(f"runs/{name}/csv/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [[float(row[name]) for row in rows if row[name]] for name in ("train/loss", "val/loss", "grad_norm")]


def agree(first, second):
    assert [len(values) for values in first] == [3, 1, 3]
    assert all(values == pytest.approx(others, rel=1e-5) for values, others in zip(first, second, strict=True))


def test_two_launchers_and_two_strategies_train_alike():
    ddp = launch(ALONE, "ddp")
    assert Path("runs/ddp/checkpoints/last.ckpt").exists()
    agree(ddp, launch(TORCHRUN, "fsdp"))


@pytest.mark.slow
def test_the_other_way_round():
    agree(launch(TORCHRUN, "ddp"), launch(ALONE, "fsdp"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_only_a_sharded_model_is_built_without_values(parallel, monkeypatch):
    models = []
    monkeypatch.setattr(CLI, "_run_subcommand", lambda self, subcommand: models.append(self.model.model))
    main(args(parallel))
    assert {p.is_meta for p in models[0].parameters()} == {parallel == "fsdp"}


def test_torchrun_and_slurm_start_a_pipeline_alike():
    flags = ["--trainer.enable_checkpointing=false"]
    first = launch(TORCHRUN, "pipeline", *flags)
    Path("runs/pipeline").rename("runs/by_torchrun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):  # as srun does
        variables = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": 2, "JOB_ID": 1, "NTASKS_PER_NODE": 2}
        variables |= {"JOB_NAME": "train", "NODELIST": "127.0.0.1"}
        environment = {f"SLURM_{name}": str(value) for name, value in variables.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *ALONE, "attnres_lit", *args("pipeline", *flags)]
        processes.append(subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert re.search(r"Stages: 0 on rank 0, sites 0-\d, [\d,]+ parameters; 1 on rank 1, sites \d-3, ", said[0])
    agree(first, losses("pipeline"))
