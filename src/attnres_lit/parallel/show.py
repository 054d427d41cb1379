"""A plan for a reader: a table, and a picture of the step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnres_lit.parallel.simulate import Step

SHOWN = 16  # rows of the table's list of ranks
COLORS = {"F": "#4878a8", "B": "#e0883a", "I": "#e0883a", "W": "#6a9f58"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
DPI, WIDTH = 150, 16.0  # of the picture; the width in inches
DIGIT = 0.075  # inches that a digit of a microbatch's number takes


def table(numbers: dict[str, Any]) -> str:
    """The numbers, for a reader."""
    return "\n".join(lines(numbers))


def lines(numbers: dict[str, Any]) -> Iterator[str]:
    """One after the other."""
    model, pipe, layout, step = (numbers[key] for key in ("model", "pipeline", "layout", "step"))
    parts, cost, crossing = numbers["parameters"], numbers["flops_per_token"], numbers["boundaries"]

    def line(name: str, text: str) -> str:
        return f"{name:<22}{text}"

    yield line("model", f"{model['residual']}, {2 * model['num_layers']} sites of width {model['dim']}")
    yield line(
        "pipeline",
        f"{pipe['schedule']}, {pipe['pipeline_parallel_size']} ranks x {pipe['virtual_stages']} stages, "
        f"{pipe['num_microbatches']} microbatches of {layout['batch_size'] // pipe['num_microbatches']} x "
        f"{layout['seq_len']} tokens, {layout['devices']} devices in all",
    )
    others = ", ".join(f"{name} {si(parts[name])}" for name in ("embedding", "sublayers", "residual", "norm_and_head"))
    yield line("parameters", f"{si(parts['total'])}: {others}".replace("_", " "))
    again = f", {si(cost['recomputed'])} computed again" if cost["recomputed"] else ""
    yield line("FLOPs per token", f"forward {si(cost['forward'])}, training {si(cost['training'])}{again}")
    io = numbers["residual_io"]
    yield line("residual traffic", f"{io['widths_per_token_and_site']:.3g} D per token and site")
    held = numbers["sources"]
    yield line(
        "finished sources", f"{held['finished']} at most: {si(held['bytes_at_max_seq_len'], 'B')} at max_seq_len"
    )
    if crossing["list"]:
        yield ""
        yield "bytes across boundaries, per microbatch and direction"
        yield f"  {'':<28}{'all':>10}{'largest':>10}"
        for key, name in (("naive", "all Sources"), ("received", "less what was received, Eq. 8"), ("exact", "exact")):
            used = key == ("exact" if pipe["cache"] else "naive")
            both = "".join(f"{si(crossing[key][each], 'B'):>10}" for each in ("bytes", "peak_bytes"))
            yield f"  {name:<28}{both}{'  <- used' if used else ''}"
    yield ""
    yield f"  {'rank':<6}{'parameters':>12}{'state':>10}{'activations':>13}{'bubble':>9}"
    for index, rank in enumerate(numbers["ranks"]):
        if index == SHOWN:
            yield f"  ... {len(numbers['ranks']) - SHOWN} more"
            break
        state, kept = (si(rank[key], "B") for key in ("state_bytes", "activation_bytes"))
        yield f"  {index:<6}{si(rank['parameters']):>12}{state:>10}{kept:>13}{rank['bubble']:>9.1%}"
    yield ""
    yield line("step", f"{si(step['seconds'], 's')}, bubble {step['bubble']:.1%}")
    share = f"{step['share_of_device_flops']:.1%} of device_flops"
    yield line("tokens per second", f"{si(step['tokens_per_second'])}, {share}")
    if step["data_parallel_bytes"]:
        moved, seconds = si(step["data_parallel_bytes"], "B"), si(step["data_parallel_seconds"], "s")
        yield line("data parallel, FSDP", f"{moved} sent a rank and step: {seconds} where it does not overlap")


def si(number: float, unit: str = "") -> str:
    """Three digits, a prefix and the unit."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}{unit}".rstrip()
    return f"{number / 1e-6:.3g} µ{unit}" if number else f"0 {unit}".rstrip()


def timeline(step: Step, path: Path, title: str) -> None:
    """Draw the step, one row per rank: a bar per action, the paler the later its stage on the rank.

    Args:
        step: what happened when.
        path: of the image.
        title: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(step.busy)
    virtual = (max(span.stage for span in step.spans) + 1) // ranks
    row = max(0.14, min(0.4, 14 / ranks))  # inches
    figure = Figure((WIDTH, 1.3 + row * ranks), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def color(kind: str, stage: int) -> tuple[float, ...]:
        pale = 0.55 * (stage // ranks) / max(1, virtual - 1)
        return tuple(part + (1 - part) * pale for part in to_rgb(COLORS[kind]))

    unit = 1e3  # milliseconds
    corners = []
    for span in step.spans:
        left, right, top, bottom = span.start * unit, span.stop * unit, span.rank - 0.42, span.rank + 0.42
        corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    faces = [color(span.kind, span.stage) for span in step.spans]
    dense = len(step.spans) / ranks > 300  # then edges would hide the bars
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=0 if dense else 0.5))
    for span, face in zip(step.spans, faces, strict=True):
        label = str(span.microbatch)
        if (span.stop - span.start) / step.seconds * (WIDTH - 1.2) > DIGIT * (len(label) + 0.6):
            middle = (span.start + span.stop) / 2 * unit
            axes.text(
                middle,
                span.rank,
                label,
                ha="center",
                va="center",
                fontsize=min(8, row * 40),
                color="white" if sum(face) < 1.5 else "black",
            )
    axes.set_xlim(0, step.seconds * unit)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(0, ranks, 1 if ranks <= 16 else ranks // 8))
    axes.set_xlabel("ms")
    axes.set_ylabel("rank")
    axes.set_title(title, loc="left", fontsize=10)
    kinds = [kind for kind in COLORS if any(span.kind == kind for span in step.spans)]
    patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(kinds), frameon=False, fontsize=9)
    figure.savefig(path)
