"""Sections on how many blocks, and how large: the paper's Fig. 6, and what blocks cost."""

from collections.abc import Mapping

from attnres_lit.experiments import comparison_figures, paper
from attnres_lit.experiments.page import Picture, Section, Table
from attnres_lit.experiments.statistics import compare
from attnres_lit.experiments.study import LOSS, LeftOut, Study, number, with_interval
from attnres_lit.experiments.variants import Setting, Variant
from attnres_lit.inference.load import strategy
from attnres_lit.parallel.activations import Precision, residual_bytes
from attnres_lit.parallel.cost_model import prefill_bytes
from attnres_lit.residual.block_attnres import block_starts


def cut(variant: Variant) -> tuple[int, int | None] | None:
    """Blocks, and sublayers per block if all have as many; None: a strategy without blocks, or with other options."""
    run = variant.one
    layers = run.of("model", "config", "num_layers")
    if run.residual not in ("BlockAttnRes", "FullAttnRes") or not paper.is_plain(run.options) or not layers:
        return None
    sites = 2 * layers
    if run.residual == "FullAttnRes":
        return sites, 1
    size = run.options.get("block_size")
    blocks = len(block_starts(sites, run.options.get("num_blocks"), size))
    return blocks, size or (sites // blocks if sites % blocks == 0 else None)


def cuts(setting: Setting, option: str) -> dict[str, tuple[int, int | None]]:
    """Cuts of a setting's finished variants; where two are the same, the one that is made with this option."""
    found = {label: cut(v) for label, v in setting.variants.items() if v.finished}
    order = sorted(found, key=lambda label: setting.variants[label].one.options.get(option) is None)
    each = {found[label]: label for label in reversed(order) if found[label] is not None}
    return {label: at for at, label in each.items() if at is not None}


def block_size(study: Study) -> Section:
    """Sublayers per block, from one to all."""
    for setting in reversed(study.settings):
        found = {label: size for label, (_, size) in cuts(setting, "block_size").items() if size is not None}
        if setting.compared_to and len(found) > 2:
            break
    else:
        raise LeftOut("it takes three block sizes, Full AttnRes as one of them, and the baseline")
    order = sorted(found, key=lambda label: found[label])
    table = compare(setting.values(), setting.compared_to).loc[order]
    sizes = [found[label] for label in order]
    base = str(setting.compared_to)
    figure = comparison_figures.block_sizes(sizes, table, study.metric, base, with_paper=study.metric == LOSS)
    lines = []
    for size, (label, row) in zip(sizes, table.iterrows(), strict=True):
        theirs = paper.BLOCK_SIZES.get(size) if study.metric == LOSS else None
        gap = None if theirs is None else theirs - paper.BASELINE
        line = [str(size), str(label), number(row["mean"]), with_interval(row["difference"], row["pooled"])]
        lines.append([*line, number(gap, "+.3f")])
    head = ["sublayers per block", "variant", "mean", f"difference to {base}", "the paper's"]
    text = "The paper's model has 32 sublayers (its Fig. 6): a block of all of them is 32 there. 1 is Full AttnRes."
    return Section("Block size", [text, Picture("block_size", figure, "loss over block size"), Table(head, lines)])


def num_blocks(study: Study) -> Section:
    """The number of blocks, with the memory that it takes."""
    for setting in reversed(study.settings):
        found = {label: blocks for label, (blocks, _) in cuts(setting, "num_blocks").items()}
        asked = [label for label in found if setting.variants[label].one.options.get("num_blocks") is not None]
        if setting.compared_to and len(asked) > 1:
            break
    else:
        raise LeftOut("it takes the baseline, and two or more runs that set num_blocks")
    order = sorted(found, key=lambda label: found[label])
    table = compare(setting.values(), setting.compared_to).loc[order]
    counts = [found[label] for label in order]
    held = [memory(setting.variants[label], found[label]) for label in order]
    base = str(setting.compared_to)
    figure = comparison_figures.num_blocks(counts, table, [each["held"] for each in held], study.metric, base)
    lines = [
        [str(count), str(label), number(row["mean"]), with_interval(row["difference"], row["pooled"]), str(count + 1)]
        + [number(size[key] / 1024, ".2f") for key in ("held", "backward")]
        for count, size, (label, row) in zip(counts, held, table.iterrows(), strict=True)
    ]
    head = ["blocks", "variant", "mean", f"difference to {base}", "sources", "their KiB per token"]
    text = (
        "A block is a source that every later site reads; the embedding is one more. Their bytes per token are what a "
        "prompt holds, and what a pipeline sends and caches. The last column is what the residual keeps for the "
        "backward pass, the inputs of the sublayers included. Full AttnRes has as many blocks as sublayers."
    )
    picture = Picture("num_blocks", figure, "loss and memory over the number of blocks")
    return Section("Number of blocks", [text, picture, Table([*head, "KiB per token for backward"], lines)])


def memory(variant: Variant, blocks: int) -> Mapping[str, int]:
    """Bytes per token: `held` in the sources that the exit reads, and kept for the `backward` pass."""
    run = variant.one
    dim, sites = run.of("model", "config", "dim"), 2 * run.of("model", "config", "num_layers")
    precision = Precision.of(run.of("trainer", "precision") or "32-true", bool(run.of("model", "fp32_residual")))
    residual = strategy(run.of("model", "residual"))(sites, dim)
    kept = residual_bytes(residual, [range(sites)], precision, run.of("model", "checkpoint_activations") or False)
    return {"held": prefill_bytes(blocks + 1, 1, dim, size=precision.source), "backward": kept[0]}
