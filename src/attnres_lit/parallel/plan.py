"""What training one model on one layout takes, before any device is asked for.

The step time is that of the pipeline alone; what data parallelism and FSDP move is reported beside it. Memory is that
of parameters, gradients, Adam's moments and of what backward waits for; copies of weights in another dtype, gathered
weights and buffers of the libraries come on top.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from attnres_lit.model import Transformer
from attnres_lit.parallel import cost_model
from attnres_lit.parallel.activations import (
    Precision,
    head_bytes,
    residual_bytes,
    sublayer_bytes,
    width,
)
from attnres_lit.parallel.cost_model import Hardware
from attnres_lit.parallel.depth import Depth, trace
from attnres_lit.parallel.partition import partition
from attnres_lit.parallel.settings import PipelineSettings, check_pipeline, uses_cache
from attnres_lit.parallel.simulate import Action, Step, orders, peaks, simulate
from attnres_lit.parallel.traffic import traffic
from attnres_lit.residual.base import Residual


class Plan(NamedTuple):
    """The numbers, in plain values, and the step that they come from."""

    numbers: dict[str, Any]
    step: Step


def plan(
    model: Transformer,
    settings: PipelineSettings,
    hardware: Hardware,
    batch_size: int,
    seq_len: int,
    precision: str | int = "bf16-mixed",
    data_parallel_size: int = 1,
    fsdp_size: int = 1,
    split_points: Sequence[int] | None = None,
) -> Plan:
    """Everything about one configuration.

    Args:
        model: may be on the meta device.
        settings: the pipeline.
        hardware: of a rank.
        batch_size: sequences that the microbatches of one pipeline share.
        seq_len: tokens of a sequence.
        precision: as Lightning names it.
        data_parallel_size: copies of the whole model.
        fsdp_size: ranks that share the parameters of a stage; each has a batch of its own.
        split_points: the first site of every stage but the first; None balances FLOPs.

    Raises:
        ValueError: settings that cannot run.
    """
    config, again = model.config, model.recompute.again
    check_pipeline(settings, batch_size, config.tie_embeddings)
    for name, value in (("data_parallel_size", data_parallel_size), ("fsdp_size", fsdp_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    sizes = Precision.of(precision, model.fp32_residual)
    residual = deepcopy(model.residual).cpu()  # it has values, wherever the model is
    depth = trace(residual)
    stages = partition(config, depth.cuts, settings.num_stages, seq_len, split_points)
    ranks, count = settings.pipeline_parallel_size, settings.num_microbatches
    cache = uses_cache(settings.cache_blocks, [depth.cuts[stage.start] for stage in stages[1:]], ranks)
    tokens = batch_size // count * seq_len  # of a microbatch

    crossing = cost_model.boundaries(depth, stages, ranks)
    sent = [(each.exact if cache else each.naive) * sizes.source * tokens for each in crossing]
    io_bytes = cost_model.residual_io(residual) * sizes.source
    durations = cost_model.durations(config, stages, io_bytes, tokens, seq_len, again, hardware)
    actions = orders(settings)
    transfers = [size / hardware.link_bandwidth for size in sent]
    step = simulate(actions, durations, transfers, hardware.link_latency)

    counts = cost_model.parameters(model, config.num_sites)
    of_stage = [counts.of_stage(stage, depth.uses) for stage in stages]
    of_rank = [sum(of_stage[rank::ranks]) for rank in range(ranks)]
    moved = [data_parallel_bytes(number, sizes, data_parallel_size, fsdp_size) for number in of_rank]
    activations = activation_bytes(model, residual, depth, stages, sizes, actions, cache, tokens)
    cost = cost_model.flops(config, seq_len, again)
    seconds, devices = step.seconds, ranks * data_parallel_size * fsdp_size
    work = cost.training * tokens * count / (seconds * ranks * hardware.device_flops)
    sources = max(sum(len(depth.shapes[i]) == 1 for i in cut.done) for cut in depth.cuts)

    def totals(each: Callable[[cost_model.Boundary], int]) -> dict[str, int]:
        of_all = [each(boundary) * sizes.source * tokens for boundary in crossing]
        return {"bytes": sum(of_all), "peak_bytes": max(of_all, default=0)}

    numbers = {
        "model": {"residual": type(residual).__name__, **asdict(config), "checkpoint_activations": again},
        "pipeline": {**asdict(settings), "cache": cache},
        "layout": {
            "batch_size": batch_size,
            "seq_len": seq_len,
            "precision": str(precision),
            "data_parallel_size": data_parallel_size,
            "fsdp_size": fsdp_size,
            "devices": devices,
        },
        "hardware": asdict(hardware),
        "parameters": {
            "total": counts.total,
            "embedding": counts.embedding,
            "sublayers": sum(counts.sublayers),
            "residual": sum(counts.residual.values()),
            "norm_and_head": counts.head,
        },
        "flops_per_token": cost._asdict(),
        "residual_io": {
            "widths_per_token_and_site": io_bytes / sizes.source / config.dim,
            "bytes_per_token": io_bytes * config.num_sites,
        },
        "sources": {
            "finished": sources,
            "bytes_at_max_seq_len": cost_model.prefill_bytes(
                sources, config.max_seq_len, config.dim, size=sizes.source
            ),
        },
        # per microbatch and direction
        "boundaries": {
            "naive": totals(lambda each: each.naive),
            "received": totals(lambda each: each.received),
            "exact": totals(lambda each: each.exact),
            "list": [
                {name: size * sizes.source * tokens for name, size in each._asdict().items()} for each in crossing
            ],
        },
        "stages": [
            {
                "rank": index % ranks,
                "first_site": stage.start,
                "last_site": stage.stop - 1,
                "parameters": of_stage[index],
                "forward_seconds": durations[index]["F"],
                "backward_seconds": durations[index]["B"],
            }
            for index, stage in enumerate(stages)
        ],
        "ranks": [
            {
                "parameters": of_rank[rank],
                "state_bytes": 4 * of_rank[rank] * sizes.parameter // fsdp_size,  # with gradient and two moments
                "activation_bytes": activations[rank],
                "bubble": step.bubbles[rank],
            }
            for rank in range(ranks)
        ],
        "step": {
            "seconds": seconds,
            "bubble": step.bubble,
            "tokens_per_second": tokens * count * data_parallel_size * fsdp_size / seconds,
            "share_of_device_flops": work,
            "data_parallel_bytes": max(moved),
            "data_parallel_seconds": max(moved) / hardware.link_bandwidth,
        },
    }
    return Plan(numbers, step)


def activation_bytes(
    model: Transformer,
    residual: Residual,
    depth: Depth,
    stages: Sequence[range],
    sizes: Precision,
    actions: Sequence[Sequence[Action]],
    cache: bool,
    tokens: int,
) -> list[int]:
    """The most that every rank keeps for backward at a time; with the cache a rank has a source once."""
    config, again = model.config, model.recompute.again
    received = traffic([depth.cuts[stage.start] for stage in stages[1:]], len(actions), cache)
    of_residual = residual_bytes(residual, stages, sizes, again)
    of_sublayer = [0] * config.num_sites if again is True else sublayer_bytes(config, sizes)
    held = [
        kept + width(depth, arrives.received) * sizes.source + sum(of_sublayer[stage.start : stage.stop])
        for kept, arrives, stage in zip(of_residual, received, stages, strict=True)
    ]
    held[0] += 8  # the tokens
    held[-1] += head_bytes(config, sizes)
    most, ranks = peaks(actions, held), len(actions)
    if again is True:
        back = recomputed_bytes(residual, stages, sublayer_bytes(config, sizes), sizes)
        most = [peak + max(back[rank::ranks]) for rank, peak in enumerate(most)]
    return [int(peak) * tokens for peak in most]


def recomputed_bytes(
    residual: Residual, stages: Sequence[range], of_sublayer: Sequence[int], sizes: Precision
) -> list[int]:
    """Of every stage, per token, the layer that takes most while backward has it back: it has one at a time."""
    layers = [
        [
            range(max(site, stage.start), min(site + 2, stage.stop))
            for site in range(stage.start // 2 * 2, stage.stop, 2)
        ]
        for stage in stages
    ]
    of_residual = iter(residual_bytes(residual, list(chain(*layers)), sizes, False))
    return [max(next(of_residual) + sum(of_sublayer[layer.start : layer.stop]) for layer in each) for each in layers]


def data_parallel_bytes(parameters: int, sizes: Precision, data_parallel_size: int, fsdp_size: int) -> int:
    """That a rank sends in a step: FSDP gathers the parameters twice and scatters gradients, copies reduce theirs."""
    shard = (fsdp_size - 1) / fsdp_size
    copies = (data_parallel_size - 1) / data_parallel_size
    gathered = 2 * shard * sizes.compute + shard * sizes.parameter
    return round(parameters * (gathered + 2 * copies * sizes.parameter / fsdp_size))
