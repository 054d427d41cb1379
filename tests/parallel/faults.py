"""Runs of several processes that are disturbed on purpose, and what becomes of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch import Callback

TESTS = Path(__file__).parents[1]
CONFIGS = TESTS.parent / "configs"
TINY = [
    "--data.corpus=TextFiles",
    "--data.corpus.paths=[corpus/*.txt]",
    "--data.val_fraction=0.3",
    "--data.seq_len=16",
    "--data.batch_size=4",
    "--model.config.dim=16",
    "--model.config.num_layers=2",
    "--model.config.num_heads=2",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
]
ALONE = ["-m"]


def torchrun(processes):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]


class Fault(Callback):
    """Disturbs one rank at the start of a step.

    Args:
        kind: what happens: kill, stop (it answers no more), forward or backward (that of a sublayer raises), callback
            (a callback raises), none; absent: the rank never joins the others.
        rank: to which rank.
        step: at which optimizer step.
    """

    def __init__(self, kind: str, rank: int = 1, step: int = 2) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        if kind == "absent" and int(os.environ.get("LOCAL_RANK", 0)) == rank:
            time.sleep(1000)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step:
            return
        Path(f"reached.{trainer.global_rank}").touch()
        if trainer.global_rank == self.rank:
            getattr(self, self.kind, lambda module: None)(pl_module)

    def kill(self, module):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, module):
        os.kill(os.getpid(), signal.SIGSTOP)

    def callback(self, module):
        raise ArithmeticError("on purpose")

    def forward(self, module):
        next(iter(module.model.sublayers.values())).register_forward_hook(lambda *_: self.callback(module))

    def backward(self, module):
        next(iter(module.model.sublayers.values())).register_full_backward_hook(lambda *_: self.callback(module))


class Outcome(NamedTuple):
    code: int  # of the process that was launched
    seconds: float  # from the fault to the end of the last process
    left: list[int]  # processes that had to be killed
    output: str


def args(subcommand, parallel, *flags, config="prenorm"):
    """Of a run on the small corpus; `parallel` is one of the files in configs/parallel, or None."""
    files = [config] if parallel is None else [config, f"parallel/{parallel}"]
    return [subcommand, *(f"--config={CONFIGS / name}.yaml" for name in files), *TINY, *flags]


def environment(**more):
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | more


def launch(launcher, arguments, disturb=None, limit=120.0, ranks=2):
    """Run the command line in processes of their own, until the last of them has ended.

    Args:
        launcher: `ALONE` or `torchrun`.
        arguments: of the command line.
        disturb: called with the process once all ranks have reached the fault.
        limit: seconds, after which what is left is killed.
        ranks: how many there are.
    """
    for mark in Path().glob("reached.*"):
        mark.unlink()
    command = [sys.executable, *launcher, "attnres_lit", *arguments]
    with open("output", "w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        start = deadline = None
        deadline, start, left = time.monotonic() + limit, time.monotonic(), []
        reached = False
        while process.poll() is None or members(process.pid):
            if not reached and len(list(Path().glob("reached.*"))) == ranks:
                reached, start = True, time.monotonic()
                if disturb:
                    disturb(process)
            if time.monotonic() > deadline:
                left = members(process.pid)
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.05)
        seconds = time.monotonic() - start
        output.seek(0)
        return Outcome(process.returncode, seconds, left, output.read())


def members(session):
    """The living processes of a session; those that have ended, and wait for their parent to notice, do not count."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            living.append(int(stat.parent.name))
    return living
