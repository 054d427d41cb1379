"""A pipeline step, simulated: the action lists of torch.distributed.pipelining, with durations and links.

A rank computes its actions in the order of the schedule, one at a time. An action starts once its input has arrived.
What it sends leaves at once and overlaps with compute; the sends of a rank queue on its one outgoing link.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage

from attnres_lit.parallel.settings import SINGLE, PipelineSettings

KINDS = ("F", "B", "I", "W")  # forward; backward, or its two halves: of the inputs, of the weights


class Action(NamedTuple):
    """What a rank computes at a time."""

    stage: int
    kind: str
    microbatch: int


class Span(NamedTuple):
    """An action in time, in seconds."""

    rank: int
    start: float
    stop: float
    stage: int
    microbatch: int
    kind: str


class Step(NamedTuple):
    """A simulated step."""

    spans: list[Span]
    seconds: float
    busy: list[float]  # seconds that each rank computes

    @property
    def bubbles(self) -> list[float]:
        """The share of the step that each rank waits."""
        return [1 - busy / self.seconds for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The share of the step that ranks wait, on average."""
        return sum(self.bubbles) / len(self.busy)


def orders(settings: PipelineSettings) -> list[list[Action]]:
    """The actions of every rank, as torch's own schedule orders them.

    Args:
        settings: a pipeline that `check_pipeline` accepts.
    """
    ranks = settings.pipeline_parallel_size
    # a schedule asks its stages for their place in the pipeline and no more until it runs
    stage: Any = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, settings.num_stages, None
    single = settings.schedule in SINGLE
    build: Any = get_schedule_class(settings.schedule)
    order = build(stage if single else [stage] * settings.virtual_stages, settings.num_microbatches).pipeline_order
    found = [
        [
            Action(each.stage_index, each.computation_type.value, each.microbatch_index)
            for each in order[rank]
            if each is not None and each.computation_type.value in KINDS
        ]
        for rank in range(ranks)
    ]
    return [_from_zero(actions) for actions in found] if single else found


def simulate(
    actions: Sequence[Sequence[Action]],
    durations: Sequence[Mapping[str, float]],
    transfers: Sequence[float],
    latency: float = 0.0,
) -> Step:
    """Run the actions of all ranks.

    Args:
        actions: of every rank, in order; stage s lives on rank s % P.
        durations: of every stage, seconds of each kind of action.
        transfers: seconds that each boundary keeps a link busy, for one microbatch and either direction.
        latency: seconds from the end of a transfer to its arrival.

    Raises:
        ValueError: the actions wait for one another.
    """
    ranks, last = len(actions), len(durations) - 1
    free, link, busy, done = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks, [0] * ranks
    arrived: dict[tuple[bool, int, int], float] = {}  # by forward or not, stage, microbatch
    waiting: dict[tuple[bool, int, int], int] = {}  # what a rank waits for
    spans: list[Span] = []
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        while done[rank] < len(actions[rank]):
            stage, kind, microbatch = actions[rank][done[rank]]
            forward = kind == "F"
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            start = free[rank]
            if kind != "W" and 0 <= source <= last:
                key = (forward, stage, microbatch)
                if key not in arrived:
                    waiting[key] = rank
                    break
                start = max(start, arrived[key])
            free[rank] = stop = start + durations[stage][kind]
            busy[rank] += stop - start
            spans.append(Span(rank, start, stop, stage, microbatch, kind))
            done[rank] += 1
            if kind == "W" or not 0 <= target <= last:
                continue
            key, arrival = (forward, target, microbatch), stop
            if target % ranks != rank:
                link[rank] = max(stop, link[rank]) + transfers[min(stage, target)]
                arrival = link[rank] + latency
            arrived[key] = arrival
            if key in waiting:
                ready.append(waiting.pop(key))
    if any(done[rank] < len(actions[rank]) for rank in range(ranks)):
        raise ValueError("the actions of this schedule wait for one another")
    return Step(spans, max(free), busy)


def peaks(actions: Sequence[Sequence[Action]], held: Sequence[float]) -> list[float]:
    """The most that each rank holds at a time.

    Args:
        actions: of every rank, in order.
        held: by every stage for one microbatch, from its forward to the end of its backward.
    """
    most = []
    for order in actions:
        now, peak = 0.0, 0.0
        split = any(action.kind == "W" for action in order)  # then the weights' half is the last to need anything
        for stage, kind, _ in order:
            if kind == "F":
                now += held[stage]
                peak = max(peak, now)
            elif kind == ("W" if split else "B"):
                now -= held[stage]
        most.append(peak)
    return most


def _from_zero(actions: Sequence[Action]) -> list[Action]:
    """Torch's list for 1F1B counts the forwards of the last rank from 1; what runs counts from 0."""
    first = min(action.microbatch for action in actions if action.kind == "F")
    return [
        action._replace(microbatch=action.microbatch - first) if action.kind == "F" else action for action in actions
    ]
