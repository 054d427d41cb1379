"""Functions on several ranks at once: real processes, gloo on this machine, one thread each.

    from parallel.world import on_ranks

    def total(start):                        # at the top level of any test file or module
        x = torch.tensor(start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert on_ranks(2, total, 10) == [21, 21]     # what each rank returned

Every call has fresh processes and a fresh process group, so calls do not see one another, and one that fails or hangs
leaves nothing behind. They are cheap, a fraction of a second: all are forked from one server that has imported torch
and Lightning, started at the first call. Arguments and results are pickled.

Inside, `torch.distributed` is ready, and a Lightning Trainer with `devices=size` finds RANK and the like in the
environment and takes the processes as created outside. The function may use several Trainers, one after the other.

A rank that raises ends the call with a `RankFailed` that has its traceback; a call that takes longer than `timeout`
seconds is killed and says where each rank was.
"""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

PRELOAD = ["pytest", "torch.distributed.fsdp", "lightning.pytorch", "attnres_lit.cli"]
GRACE = 3.0  # seconds that the other ranks have to fail too, so that the cause is among what is reported

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOAD)


class RankFailed(AssertionError):
    """A rank raised, died or hung."""


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Run `function(*args, **kwargs)` on ranks 0 to `size - 1`, and return what each of them returned.

    Args:
        size: processes.
        function: at the top level of its file.
        timeout: seconds, after which all are killed.

    Raises:
        RankFailed: a rank raised, died or did not finish in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code, port = sys.modules[function.__module__].__file__, _free_port()
    task = (function.__module__, code, function.__qualname__, pickle.dumps((args, kwargs)))
    with tempfile.TemporaryDirectory() as folder:
        ends = [_forks.Pipe() for _ in range(size)]
        processes = [
            _forks.Process(target=_work, args=(rank, size, port, folder, timeout, there, task))
            for rank, (_, there) in enumerate(ends)
        ]
        try:
            for process, (_, there) in zip(processes, ends, strict=True):
                process.start()
                there.close()
            return _collect(processes, [here for here, _ in ends], Path(folder), timeout)
        finally:
            for process, (here, _) in zip(processes, ends, strict=True):
                here.close()  # a rank that is done waits for this
                process.join(1)
                process.kill()
                process.join()


def _collect(processes: list[Any], ends: list[Any], folder: Path, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline, open_ends = time.monotonic() + timeout, dict(zip(ends, range(len(ends)), strict=True))
    while open_ends:
        ready = connection.wait(list(open_ends), max(0, deadline - time.monotonic()))
        for end in ready:
            rank = open_ends.pop(end)
            try:
                succeeded, value = pickle.loads(end.recv_bytes())
            except EOFError:
                processes[rank].join(1)
                succeeded, value = False, f"died with exit code {processes[rank].exitcode}\n"
            (results if succeeded else errors)[rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + GRACE)
        if not ready:
            did = "waited at\n" if errors else "hangs at\n"
            errors |= {rank: did + _stack(processes[rank].pid, folder / f"{rank}.stack") for rank in open_ends.values()}
            break
    if errors:
        raise RankFailed("\n".join(f"rank {rank} of {len(ends)} {error}" for rank, error in errors.items()))
    return [results[rank] for rank in range(len(ends))]


def _stack(pid: int, path: Path) -> str:
    """Where a running process is."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    frames = path.read_text().partition(f'  File "{__file__}"')[0]  # innermost first, down to this file
    return frames or "an unknown place\n"


def _work(rank: int, size: int, port: int, folder: str, timeout: float, end: Any, task: tuple[Any, ...]) -> None:
    """What a rank does."""
    stack = open(Path(folder) / f"{rank}.stack", "w")  # noqa: SIM115 - as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", timedelta(seconds=timeout), rank=rank, world_size=size
        )
        module, code, name, arguments = task
        function = getattr(_module(module, code), name)
        args, kwargs = pickle.loads(arguments)
        outcome = pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:
        outcome = pickle.dumps((False, "raised\n" + traceback.format_exc()))
    end.send_bytes(outcome)
    end.poll(None)  # until every rank is done, for those that still talk to this one


def _module(name: str, file: str) -> Any:
    """A module by its name, or, as pytest imports test files, by its file."""
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
