"""`attnres_lit report`: a folder of runs as one page, Markdown and pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path

from attnres_lit.checks import nearest
from attnres_lit.experiments.block_sections import block_size, num_blocks
from attnres_lit.experiments.depth_sections import depth_weights, dynamics
from attnres_lit.experiments.drawing import colours, files, look
from attnres_lit.experiments.final_sections import curves, final_values, runs
from attnres_lit.experiments.page import Picture, Section, Table, html, markdown, markdown_table
from attnres_lit.experiments.records import read_runs
from attnres_lit.experiments.scaling_sections import architecture, scaling
from attnres_lit.experiments.study import LeftOut, Study
from attnres_lit.experiments.variants import labels, settings

SECTIONS: dict[str, Callable[[Study], Section]] = {
    "final values": final_values,
    "curves": curves,
    "block size": block_size,
    "number of blocks": num_blocks,
    "scaling": scaling,
    "deep or wide": architecture,
    "along depth": dynamics,
    "what each site reads": depth_weights,
    "runs": runs,
}


def study_of(roots: Sequence[Path], metric: str, baseline: str | None, at_loss: float | None) -> Study:
    """The runs at or below these folders, side by side.

    Raises:
        ValueError: a folder without runs; a metric that no run logged; a baseline that is none of the variants.
    """
    found = read_runs(roots)
    known = sorted({name for run in found for name in run.curves if not name.startswith("depth/")})
    if metric not in known:
        raise ValueError(f"--metric {metric}: no run logged it; there is {', '.join(known)}{nearest(metric, known)}")
    side_by_side = settings(found, metric, baseline)
    names = labels(side_by_side)
    base = next((setting.baseline for setting in side_by_side if setting.baseline), None)
    return Study(found, side_by_side, metric, at_loss, colours(names, base))


def sections_of(study: Study) -> tuple[dict[str, Section], list[str]]:
    """What the runs hold, and a line for each section that they do not."""
    made, missing = {}, []
    for name, make in SECTIONS.items():
        try:
            made[name] = make(study)
        except LeftOut as reason:
            missing.append(f"Left out: {name}: {reason}.")
    return made, missing


def report(
    roots: Sequence[Path], out: Path, metric: str, baseline: str | None, at_loss: float | None, command: str
) -> list[str]:
    """Write `index.html`, `report.md` and the figures; returns what to print.

    Args:
        roots: folders of runs, or of one run.
        out: folder for the report, made if it is not there.
        metric: to compare.
        baseline: of the differences; None: PreNorm, or else the first run.
        at_loss: where computes are compared; None: what the baseline reaches at its largest size.
        command: that was asked for, for the page to name.

    Raises:
        ValueError: see `study_of`; the folder cannot be written.
    """
    study = study_of(roots, metric, baseline, at_loss)
    with look():
        made, missing = sections_of(study)
        pictures = [part for section in made.values() for part in section.parts if isinstance(part, Picture)]
        images = {picture.name: files(picture.figure) for picture in pictures}
    title = "Report of " + ", ".join(root.resolve().name for root in roots)
    intro = [f"{len(study.runs)} runs, compared by {metric}.", *unfinished(study), *missing]
    pngs = {name: each[".png"] for name, each in images.items()}
    written = {
        "index.html": html(title, intro, list(made.values()), command, pngs).encode(),
        "report.md": markdown(title, intro, list(made.values()), command).encode(),
        **{name + suffix: content for name, each in images.items() for suffix, content in each.items()},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from None
    final = made["final values"].parts if "final values" in made else []
    return [*(markdown_table(part) for part in final if isinstance(part, Table)), *intro, str(out / "index.html")]


def unfinished(study: Study) -> list[str]:
    """A line on the runs that are in no table, if there are any."""
    states = {run.name: run.state(study.metric) for run in study.runs}
    left = [f"{name} ({state})" for name, state in states.items() if state != "finished"]
    return [f"In no table, since they are not finished: {', '.join(left)}."] if left else []
