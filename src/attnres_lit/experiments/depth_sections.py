"""Sections on what happens along depth (paper, Fig. 5 and 8)."""

import numpy as np
import pandas as pd

from attnres_lit.experiments import depth_figures
from attnres_lit.experiments.page import Picture, Section, Table, file_name
from attnres_lit.experiments.records import by_layer
from attnres_lit.experiments.study import LeftOut, Study, number
from attnres_lit.experiments.variants import Setting

OBSERVED = 3  # steps, the last ones, whose mean is shown


def dynamics(study: Study) -> Section:
    """Sizes of outputs and gradients after each layer, at the end of training."""
    setting, found = _most(study, lambda setting: {k: v for k in depth_figures.NAMES if (v := layers(setting, k))})
    if not found:
        raise LeftOut("no finished run logged depth/output_rms or depth/grad_norm")
    figure = depth_figures.dynamics(found, study.colours)
    lines = []
    for label in dict.fromkeys(label for variants in found.values() for label in variants):
        rms, norms = (found.get(name, {}).get(label) for name in depth_figures.NAMES)
        line = [label]
        line += ["–", "–"] if rms is None else [mean(rms.iloc[-1] / rms.iloc[0]), mean(rms.max())]
        lines.append([*line, "–" if norms is None else mean(norms.std() / norms.mean())])
    head = ["variant", "output RMS, last / first layer", "its maximum", "gradient norms, std / mean over layers"]
    text = (
        f"{_of(setting)}Means of the last {OBSERVED} observed steps; the band is the range of the seeds. In the table: "
        "mean ± standard error over seeds. Of Block AttnRes the output is the sum of the current block, of Full "
        "AttnRes the newest sublayer's, of mHC the mean of the streams."
    )
    return Section(
        "Along depth", [text, Picture("dynamics", figure, "RMS and gradient norm by layer"), Table(head, lines)]
    )


def layers(setting: Setting, name: str) -> dict[str, pd.DataFrame]:
    """A metric by layer (rows) and seed (columns), of every variant that logged it."""
    found = {}
    for label, variant in setting.variants.items():
        seeds = {run.seed: by_layer(run, name, OBSERVED) for run in variant.finished}
        if table := {seed: series for seed, series in seeds.items() if series is not None}:
            found[label] = pd.DataFrame(table)
    return found


def depth_weights(study: Study) -> Section:
    """What each site reads, and how evenly."""
    setting, found = _most(study, _weights)
    if not found:
        raise LeftOut("no finished run has a depth_weights.npz with what its sites read")
    parts: list = [
        f"{_of(setting)}Mean weights over tokens and seeds, at the last validation. Entropy is relative to reading all "
        "sources alike: 1 is a plain mean, 0 a single source.",
    ]
    lines = []
    for label, seeds in found.items():
        table = np.mean([each.table for each in seeds], axis=0)
        entropies = np.array([each.entropy for each in seeds])
        shown = entropies.mean(axis=0)
        figure = depth_figures.depth_weights(label, table, seeds[0].sites, shown)
        parts.append(Picture(file_name("depth_weights", label), figure, f"what the sites of {label} read"))
        kinds = (entropies[:, 0:-1:2], entropies[:, 1:-1:2], entropies[:, -1:])
        lines.append([label, *(mean(pd.DataFrame(kind).mean(axis=1)) for kind in kinds)])
    head = ["mean entropy", "before attention", "before MLP", "exit"]
    return Section("What each site reads", [*parts, Table(head, lines)])


def _weights(setting: Setting) -> dict:
    found = {label: [run.weights for run in v.finished if run.weights] for label, v in setting.variants.items()}
    return {label: seeds for label, seeds in found.items() if seeds}


def _most(study: Study, of) -> tuple[Setting, dict]:
    """The setting with the most variants that have such data, and of those the largest; and the data."""
    found = [(setting, of(setting)) for setting in reversed(study.settings)]
    return max(found, key=lambda each: max(map(len, each[1].values()), default=0))


def _of(setting: Setting) -> str:
    return f"Of {setting.label}. " if setting.label else ""


def mean(seeds: pd.Series) -> str:
    """Mean and standard error."""
    values = seeds.dropna().to_numpy(dtype=float)
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
    return number(float(values.mean()) if len(values) else None, ".3g") + error
