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
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

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
    running: dict[int, tuple[Job, subprocess.Popen]] = {}  # by slot
    failed: dict[str, str] = {}
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="cell", dynamic_ncols=True)
    with bar, stopping(lambda: stop([process for _, process in running.values()])):
        while waiting or running:
            for slot in set(range(at_once)) - running.keys():
                job = next((each for each in waiting if free(runs_dir / each.name)), None)
                if job is not None:
                    waiting.remove(job)
                    if (done(runs_dir / job.name) or 0) < job.steps:  # another process may have finished it
                        running[slot] = job, start(job, runs_dir, slot)
                    else:
                        bar.update()
            now = ", ".join(job.name for job, _ in running.values()) or "waiting for other processes"
            if now != bar.postfix:
                bar.set_postfix_str(now)
            time.sleep(PERIOD)
            for slot, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    bar.update()
                    if reason := fault(job, runs_dir, process.returncode):
                        failed[job.name] = reason
                        bar.write(f"failed: {job.name}: {reason}")
    return failed


def log_file(job: Job, runs_dir: Path) -> Path:
    """Where a cell's output goes."""
    return runs_dir / "logs" / f"{job.name}.log"


def start(job: Job, runs_dir: Path, slot: int) -> subprocess.Popen:
    """Start a cell; of several GPUs, each slot has one."""
    log = log_file(job, runs_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if (gpus := torch.cuda.device_count()) > 1:
        known = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = known[slot % gpus]
    with log.open("ab") as out:
        return subprocess.Popen(
            command(job, runs_dir),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C reaches the sweep alone, which passes it on
        )


def free(folder: Path) -> bool:
    """Whether no process trains there."""
    try:
        claim(folder).release()
    except ValueError:
        return False
    return True


def fault(job: Job, runs_dir: Path, code: int) -> str | None:
    """What went wrong with a cell whose process has ended, in one line; None if it is finished."""
    if code == 0 and (done(runs_dir / job.name) or 0) >= job.steps:
        return None
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    log = log_file(job, runs_dir)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines or ["no output"]
    return f"{said[-1]} ({how}; see {log})"


@contextmanager
def stopping(end: Callable[[], None]) -> Generator[None]:
    """On SIGINT and SIGTERM, end what runs, then leave."""

    def on_signal(signum: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_DFL)  # once more: at once
        end()
        raise SystemExit(128 + signum)

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
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
            process.kill()
            process.wait()
