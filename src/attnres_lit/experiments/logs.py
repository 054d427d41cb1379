"""The logs of a run as curves: of every metric, its values over the optimizer steps behind them."""

import csv
from pathlib import Path

import pandas as pd

CSV = "csv/version_*/metrics.csv"
EVENTS = "events.out.tfevents.*"
Curves = dict[str, pd.Series]  # by metric; the index counts optimizer steps, from 1


def run_folders(root: Path) -> list[Path]:
    """The folders with logs at or below `root`, in order of their names.

    Raises:
        ValueError: there is no such folder, or no log in it.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    found = {log.parents[2] for log in root.rglob(CSV)} | {log.parent for log in root.rglob(EVENTS)}
    if not found:
        raise ValueError(f"{root} holds no run: no {CSV} below it")
    return sorted(found)


def read_logs(folder: Path) -> Curves:
    """All metrics of a run, from its CSV logs or, where there are none, from TensorBoard's.

    A resumed run has several logs; of a step that is in two of them, the later one counts.
    """
    logs = sorted(folder.glob(CSV), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    if not logs:
        return _events(folder)
    values: dict[str, dict[int, float]] = {}
    for log in logs:
        for row in _whole_rows(log):
            step = int(row.pop("step")) + 1  # logs count from 0
            for metric, text in row.items():
                if text:
                    values.setdefault(metric, {})[step] = float(text)
    values.pop("epoch", None)
    return {metric: pd.Series(points, dtype=float).sort_index() for metric, points in values.items()}


def _whole_rows(log: Path) -> list[dict[str, str]]:
    """The rows of a CSV log; one that a killed run left unfinished, or that holds no numbers, is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if not lines:
        return []
    head, *rows = csv.reader(line for line in lines if line.endswith("\n"))
    whole = [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]
    return [row for row in whole if row.get("step", "").isdigit() and all(map(_is_number, row.values()))]


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _events(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1}).Reload()
    curves: Curves = {}
    for metric in list(reader.scalars.Keys()):
        points = {event.step + 1: event.value for event in reader.Scalars(metric)}
        curves[metric] = pd.Series(points, dtype=float).sort_index()
    curves.pop("epoch", None)
    return curves
