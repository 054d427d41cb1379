"""Whatever ends one process ends the run: within seconds, with a word on why, nothing left, and it can go on.

Slow: every kind of end under every strategy. The run then goes on, in one process, from what it saved last.
"""

import csv
import os
import re
import signal
from pathlib import Path

import pytest

from attnres_lit.cli import main
from parallel.faults import ALONE, args, launch, torchrun

TIMEOUT = 5  # seconds; DDP, which has no more patience at the start, gets 30
PROCESSES = {"ddp": 2, "fsdp": 2, "pipeline": 2, "hybrid": 4}
SAID = {
    "kill": r"error: rank \d of \d.*rank 1 was killed by SIGKILL|another rank has ended",
    "save": "the process that started it has ended|another rank has ended",
    "stop": rf"error: rank \d of \d.* at step \d: another rank did not answer within ({TIMEOUT}|30) s",
    "forward": r"rank 1 of \d.*at step 3: ArithmeticError: on purpose",
    "backward": r"rank 1 of \d.*at step 3: ArithmeticError: on purpose",
    "callback": r"rank 1 of \d.*at step 3: ArithmeticError: on purpose",
    "interrupt": r"Detected KeyboardInterrupt|rank \d of \d.*: SIGINT",
    "interrupt all": r"Detected KeyboardInterrupt|rank \d of \d.*: SIGINT",
    "terminate": r"error: rank \d of \d.*: SIGTERM",
}
SIGNALS = {
    "interrupt": lambda process: process.send_signal(signal.SIGINT),  # from another terminal
    "interrupt all": lambda process: os.killpg(process.pid, signal.SIGINT),  # Ctrl-C
    "terminate": lambda process: process.send_signal(signal.SIGTERM),
}


pytestmark = pytest.mark.usefixtures("workdir")


def disturbed(launcher, parallel, kind, rank=1, limit=90):
    """What became of a run that saved at step 2, was disturbed at step 3, and would have gone on for long."""
    ranks = PROCESSES[parallel]
    seconds = "0:0:30" if parallel == "ddp" else TIMEOUT
    strategy = ["--trainer.strategy.class_path=DDPStrategy"] if parallel == "ddp" else []
    outcome = launch(
        ALONE if launcher == "alone" else torchrun(ranks),
        args(
            "fit",
            parallel,
            *strategy,
            f"--trainer.strategy.init_args.timeout={seconds}",
            "--trainer.max_steps=400",
            "--trainer.val_check_interval=400",
            "--name=run",
            "--trainer.callbacks+=attnres_lit.training.callbacks.LastCheckpoint",
            "--trainer.callbacks.dirpath={run}/checkpoints",
            "--trainer.callbacks.every_n_steps=2",
            "--trainer.callbacks+=parallel.faults.Fault",
            f"--trainer.callbacks.kind={'none' if kind in SIGNALS else kind}",
            f"--trainer.callbacks.rank={rank}",
            "--trainer.callbacks.step=3",
        ),
        SIGNALS.get(kind),
        limit,
        ranks,
    )
    assert outcome.left == [], outcome.output
    assert outcome.code != 0, outcome.output
    return outcome


def goes_on():
    """One process continues from the last checkpoint, wherever the run was when it ended."""
    flags = ["--name=run", "--trainer.max_steps=401", "--trainer.val_check_interval=400", "--ckpt_path=last"]
    main([*args("fit", None, *flags), "--trainer.limit_train_batches=8", "--trainer.max_epochs=1"])
    with open(sorted(Path("runs/run/csv").glob("version_*"))[-1] / "metrics.csv") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert steps[0] >= 2
    assert len(steps) > 1


def check(launcher, parallel, kind, rank=1):
    outcome = disturbed(launcher, parallel, kind, rank)
    by_torchrun = 30 * (launcher == "torchrun" and kind == "stop")  # it leaves that long to a process that is stopped
    assert outcome.seconds < (30 if parallel == "ddp" else TIMEOUT) * (kind == "stop") + 20 + by_torchrun, (
        outcome.output
    )
    assert re.search(SAID[kind], outcome.output), outcome.output
    goes_on()


@pytest.mark.parametrize(
    ("launcher", "parallel", "kind", "rank"),
    [("alone", "pipeline", "save", 0), ("alone", "pipeline", "stop", 0), ("torchrun", "fsdp", "callback", 1)],
)
def test_a_run_ends_and_goes_on(launcher, parallel, kind, rank):
    check(launcher, parallel, kind, rank)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("parallel", PROCESSES)
@pytest.mark.parametrize("launcher", ["alone", "torchrun"])
def test_every_end_of_every_strategy(launcher, parallel, kind):
    check(launcher, parallel, kind, rank=0 if kind == "save" else 1)  # the rest of a checkpoint is written by rank 0


@pytest.mark.slow
def test_a_rank_that_never_comes():
    assert "before all processes had met" in disturbed("alone", "pipeline", "absent", limit=120).output
