"""Trains the cells of a sweep: each an ordinary `fit` in a process and a folder of its own.

What is finished is skipped and what was interrupted goes on, so a sweep that was killed is started again with the same
command. A cell that another process holds, of another sweep on the same folder or left over from a killed one, is
waited for.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm

from attnres_lit.parallel.atomic import located
from attnres_lit.parallel.checkpoint import describe
from attnres_lit.runs import claim

PERIOD = 0.2  # seconds between two looks
QUIET = "--trainer.enable_progress_bar=false"  # a sweep has a bar of its own
GRACE = 120.0  # seconds in which a run may write its checkpoint when it is asked to stop


@dataclass(frozen=True)
class Job:
    """A cell with all it takes to train it.

    Args:
        name: of the cell, and of its folder below the sweep's.
        arguments: of `fit`.
        steps: optimizer steps at its end.
    """

    name: str
    arguments: list[str]
    steps: int


@dataclass(frozen=True)
class Attempt:
    """A cell that is being trained.

    Args:
        job: the cell.
        process: its `fit`.
        log: where its output goes.
        begins: bytes of the log, which earlier attempts have written.
    """

    job: Job
    process: subprocess.Popen
    log: Path
    begins: int


def done(folder: Path) -> int | None:
    """Steps that a run's newest checkpoint has behind it; None: it has no checkpoint that can be read."""
    try:
        return describe(located(folder / "checkpoints" / "last.ckpt"))["global_step"]
    except ValueError:
        return None


def command(job: Job, runs_dir: Path) -> list[str]:
    """The `fit` of a cell, from its start or from its checkpoint."""
    resume = ["--ckpt_path", "last"] if done(runs_dir / job.name) is not None else []
    place = ["--name", job.name, "--runs_dir", str(runs_dir), QUIET]
    return [sys.executable, "-m", "attnres_lit", "fit", *job.arguments, *place, *resume]


def run(jobs: Sequence[Job], runs_dir: Path, at_once: int) -> dict[str, str]:
    """Train what is not finished. Returns the cells that failed, and why.

    Raises:
        SystemExit: on SIGINT and SIGTERM, after the runs have stopped.
    """
    waiting = [job for job in jobs if (done(runs_dir / job.name) or 0) < job.steps]
    running: dict[int, Attempt] = {}  # by slot
    failed: dict[str, str] = {}
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="cell", dynamic_ncols=True)
    with bar, noticed() as signals:
        while waiting or running:
            if signals:
                stop([attempt.process for attempt in running.values()])
                raise SystemExit(128 + signals[0])
            for slot in set(range(at_once)) - running.keys():
                job = next((each for each in waiting if free(runs_dir / each.name)), None)
                if job is not None:
                    waiting.remove(job)
                    if (done(runs_dir / job.name) or 0) < job.steps:  # another process may have finished it
                        running[slot] = start(job, runs_dir, slot)
                    else:
                        bar.update()
            now = ", ".join(attempt.job.name for attempt in running.values()) or "waiting for other processes"
            if now != bar.postfix:
                bar.set_postfix_str(now)
            time.sleep(PERIOD)
            for slot, attempt in list(running.items()):
                if attempt.process.poll() is None:
                    continue
                del running[slot]
                job, reason = attempt.job, fault(attempt, runs_dir)
                if reason and not free(runs_dir / job.name):  # another process took it first
                    waiting.append(job)
                    continue
                bar.update()
                if reason:
                    failed[job.name] = reason
                    bar.write(f"failed: {job.name}: {reason}")
    return failed


def start(job: Job, runs_dir: Path, slot: int) -> Attempt:
    """Start a cell; of several GPUs, each slot has one."""
    log = runs_dir / "logs" / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if (gpus := torch.cuda.device_count()) > 1:
        known = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = known[slot % gpus]
    with log.open("ab") as out:
        begins = out.tell()
        process = subprocess.Popen(
            command(job, runs_dir),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C reaches the sweep alone, which passes it on
        )
    return Attempt(job, process, log, begins)


def free(folder: Path) -> bool:
    """Whether no process trains there."""
    try:
        claim(folder).release()
    except ValueError:
        return False
    return True


def fault(attempt: Attempt, runs_dir: Path) -> str | None:
    """What went wrong with a cell whose process has ended, in one line; None if it is finished."""
    code, job, log = attempt.process.returncode, attempt.job, attempt.log
    if code == 0 and (done(runs_dir / job.name) or 0) >= job.steps:
        return None
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    output = log.read_bytes()[attempt.begins :].decode(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines or ["no output"]
    return f"{said[-1]} ({how}; see {log})"


@contextmanager
def noticed() -> Generator[list[int]]:
    """The SIGINT or SIGTERM that has come, if one has, for a moment at which no run is just being started."""
    signals: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        for each in before:
            signal.signal(each, signal.SIG_DFL)  # once more: at once

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ask runs to end, and wait until they have."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
