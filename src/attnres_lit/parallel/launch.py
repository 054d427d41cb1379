"""The processes of a run under Lightning: they start together, wait for one another not too long, end together."""

import atexit
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from attnres_lit.parallel.watch import Watch, end, ended, say

Base = ModelParallelStrategy if TYPE_CHECKING else object  # what it is mixed into
set_timeout = getattr(dist.distributed_c10d, "set_timeout" if hasattr(dist, "set_timeout") else "_set_pg_timeout")
PARENT = "ATTNRES_LIT_PARENT"  # in the environment of a process: which one has started it
START = 60.0  # seconds; one process may be done with its imports long before another


class RankLost(RuntimeError):
    """Another process of the run has ended, or does not answer."""


class EndsTogether(Base):
    """For a strategy of several processes: its timeout holds wherever they wait, and none outlives a failure.

    Stands before the strategy in the bases.
    """

    def _configure_launcher(self) -> None:
        """Raises ValueError: a timeout of no seconds."""
        assert self.cluster_environment is not None
        assert self._timeout is not None
        if (seconds := self._timeout.total_seconds()) <= 0:  # in a constructor, the parser would bury it
            raise ValueError(f"timeout={seconds:g} must be above 0 seconds")
        self._launcher = Launcher(self.cluster_environment, len(self.parallel_devices or ()), self.num_nodes)

    def setup_environment(self) -> None:
        """Start the processes, with more patience than later."""
        asked = self._timeout
        assert asked is not None
        self._timeout = max(asked, timedelta(seconds=START))
        super().setup_environment()
        self._timeout = asked
        self.limit_waiting()

    def limit_waiting(self) -> None:
        """In collectives of all processes and along the mesh, where torch has a timeout of its own."""
        assert self._timeout is not None
        for group in (dist.group.WORLD, *self.device_mesh.get_all_groups()):
            set_timeout(self._timeout, group)


class Launcher(_SubprocessScriptLauncher):
    """Lightning's, and none of the processes outlives the failure of another.

    With processes that were created by somebody else, torchrun or SLURM, it starts none, and looks after its own.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes of this machine, and call the function in this one.

        Raises:
            RankLost: an operation on several processes failed because of another one.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        parent = int(os.environ.get(PARENT, 0))
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            atexit.register(self._join)
        trainer._signal_connector = Signals(trainer)
        started_by = parent if parent == os.getppid() else None
        if parent and os.getppid() == 1 and self.cluster_environment.local_rank() > 0:
            raise RankLost("the process that started this one has ended")
        try:
            with Watch(lambda: place(trainer), self.procs, started_by):
                return function(*args, **kwargs)
        except BaseException as error:
            atexit.unregister(self._join)
            fault = ended(self.procs)  # before they are asked to
            end(self.procs)
            if started_by == os.getppid():
                os.kill(started_by, signal.SIGCONT)  # if it was stopped, it has to learn of this
            if isinstance(error, Exception) and (reason := lost(error, trainer)):
                raise RankLost(f"{place(trainer)}, {doing(trainer)}: {fault or reason}") from error
            if isinstance(error, Exception):
                *_, cause = chain(error)
                error.add_note(f"{place(trainer)}, {doing(trainer)}: {type(cause).__name__}: {cause}")
            raise

    def _join(self) -> None:
        """At the end of a run that went well: it is one, and fails, until all of its processes have ended."""
        for child in self.procs:
            with suppress(TimeoutExpired):
                child.wait(START)
        fault = ended(self.procs)
        end(self.procs)
        if fault:
            say(fault)
            os._exit(1)  # too late for an exception


class Signals(_SignalConnector):
    """Leaves SIGTERM to `Watch`: Lightning's handler broadcasts, whatever the other processes are about to do."""

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        """Nothing; the handler that was there before comes next."""


def place(trainer: Trainer) -> str:
    """Which part of the run this process is: its rank, and what its strategy adds to that."""
    strategy = trainer.strategy
    assert isinstance(strategy, ParallelStrategy)
    rank = trainer.node_rank * trainer.num_devices + trainer.local_rank  # known before the processes have met
    if dist.is_initialized():
        rank = dist.get_rank()
    stages = getattr(strategy, "stages", "")
    return f"rank {rank} of {trainer.num_devices * trainer.num_nodes}" + (f" ({stages})" if stages else "")


def doing(trainer: Trainer) -> str:
    """What a run is about, in a few words."""
    if not dist.is_initialized():
        return "before all processes had met"
    return f"{trainer.state.stage.value if trainer.state.stage else trainer.state.fn} at step {trainer.global_step}"


def lost(error: BaseException, trainer: Trainer) -> str | None:
    """What an error says of another process; None: it is about something else."""
    for each in chain(error):
        text = str(each)
        if isinstance(each, dist.DistError) or "gloo/transport" in text:
            if re.search("time[ds]? ?out", text, re.IGNORECASE):
                limit: timedelta = trainer.strategy._timeout  # pyrefly: ignore[missing-attribute]
                return f"another rank did not answer within {limit.total_seconds():g} s"
            return "another rank has ended; its own message says why"
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
