"""A thread that sees to it that the processes of a run end together.

A process that waits for another one, inside torch.distributed, sees neither a signal nor what became of the others.
This thread does, and ends the process if its main thread does not.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

GRACE = 3.0  # seconds in which a main thread may end by itself: it has more to say
PERIOD = 0.2  # seconds between two looks


class Watch:
    """Looks after this process while its body runs: `with Watch(...):`, in the main thread.

    On SIGTERM the body raises SystemExit. When it gets no chance to, on SIGTERM or SIGINT, or when a process that this
    one depends on has ended, the process ends without it, with a message.

    Args:
        name: what this process calls itself in a message.
        children: the processes that this one has started, ranks 1 and up; killed if this process is ended.
        parent: the process that started this one; None: it is not of the run.
    """

    def __init__(self, name: Callable[[], str], children: Sequence[subprocess.Popen], parent: int | None) -> None:
        self.name = name
        self.children = children
        self.parent = parent
        self.over, self.noticed = threading.Event(), threading.Event()
        self.patience = 0.0  # until when SIGTERM is ignored
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Watch":
        """Start."""
        self.read_end, self.write_end = os.pipe()
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self.write_end, False)
            self.wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
            _keep_from_forks()
            self.before = {each: signal.signal(each, self._on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop; signals do what they did before."""
        if kind is not None:  # about to end, and should get to say why
            self.patience = time.monotonic() + 2 * GRACE
        self.over.set()
        if self.before:
            signal.set_wakeup_fd(self.wakeup)
            for signum, handler in self.before.items():
                if not self.patience or signum == signal.SIGINT:
                    signal.signal(signum, handler)
        self.thread.join()
        os.close(self.read_end)
        os.close(self.write_end)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """In the main thread; after the body too, where Lightning puts this handler back or the body has failed."""
        self.noticed.set()
        if callable(before := self.before[signum]):
            before(signum, frame)
        elif not self.over.is_set():
            say(f"{self.name()}: {signal.Signals(signum).name}")
            raise SystemExit(128 + signum)
        elif time.monotonic() > self.patience:
            signal.signal(signum, before)
            signal.raise_signal(signum)

    def _look(self) -> None:
        """The thread."""
        while not self.over.is_set():
            signals = self._signals()
            if signals:
                if not self.noticed.wait(GRACE) and not self.over.is_set():
                    self._end(f"{signal.Signals(signals[0]).name}", 128 + signals[0])
            elif (fault := self.fault()) and not self.over.wait(GRACE):
                self._end(fault, 1)

    def _signals(self) -> list[int]:
        """Those of the last moments that ask this process to end."""
        if not select.select([self.read_end], [], [], PERIOD)[0]:
            return []
        return [each for each in os.read(self.read_end, 64) if each in (signal.SIGINT, signal.SIGTERM)]

    def fault(self) -> str | None:
        """What became of a process that this one depends on, if it has ended too early."""
        if self.parent is not None and os.getppid() != self.parent:
            return "the process that started it has ended"
        return ended(self.children)

    def _end(self, reason: str, code: int) -> None:
        say(f"{self.name()}: {reason}")
        for child in self.children:
            child.kill()
        os._exit(code)  # the main thread may never come back


def ended(children: Sequence[subprocess.Popen]) -> str | None:
    """Which child has failed, and how; None if none has."""
    for rank, child in enumerate(children, start=1):
        if code := child.poll():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"local rank {rank} {how}"
    return None


def end(children: Sequence[subprocess.Popen]) -> None:
    """Ask the children to end, with time for a word; kill what is left."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + 2 * GRACE
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(PERIOD / 4)
    for child in children:
        child.kill()  # one that was stopped, too
        child.wait()


def say(message: str) -> None:
    """Print an error, in one line."""
    sys.stderr.flush()
    os.write(2, f"error: {message}\n".encode())  # without the locks that the main thread may hold


@cache
def _keep_from_forks() -> None:
    """The workers of a data loader have this process's pipe, and their signals are not its own."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
