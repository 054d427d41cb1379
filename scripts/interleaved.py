"""What the benchmarks share: interleaved rounds, bytes, and a table with the machine it was made on."""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20


def times(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step in every round. A round runs each step once, so that noise hits all of them alike.

    Args:
        steps: what to run, by name.
        rounds: rounds that count.
        warmup: rounds before them.
        clock: `time.thread_time` leaves out what other processes take from this one, and other threads.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warmup + rounds):
        for name, step in steps.items():
            synchronize()
            start = clock()
            step()
            synchronize()
            taken[name].append(clock() - start)
    return {name: seconds[warmup:] for name, seconds in taken.items()}


def paired_ratio(seconds: list[float], baseline: list[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes held for backward once `forward` has returned, and the most held at a time up to the end of backward.

    Beyond what was alive before, in both cases; gradients of parameters count towards the second.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function("backward begins"):
            pass
        loss.backward()
    kineto: Any = profiler.profiler  # the stored type lacks `nbytes`
    now = held = peak = 0
    for event in sorted(kineto.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "backward begins":
            held = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return held, peak


def machine() -> dict[str, Any]:
    """Date, processor, threads, and the versions that matter."""
    versions = {}
    for package in ("torch", "numba", "fla-core", "attn-res", "hyper-connections", "x-transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else models[0] or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "copy_gb_per_s": round(copy_bandwidth(), 1),
        **versions,
    }


def copy_bandwidth(size: int = 256 * MIB) -> float:
    """Bytes read and written a second, in GB, by a plain copy that no cache holds."""
    source = torch.ones(size // 4, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(source)
    fastest = min(times({"copy": lambda: target.copy_(source)}, 5)["copy"])
    return 2 * size / fastest / 1e9


def report(rows: list[dict[str, Any]], settings: dict[str, Any], path: Path | None) -> None:
    """Print a markdown table; write everything to `path` as JSON if there is one."""
    about = {**machine(), **settings}
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        print("| " + " | ".join(cells) + " |")
    if path is not None:
        path.write_text(json.dumps({"about": about, "rows": rows}, indent=2, default=str) + "\n")
