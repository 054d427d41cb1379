"""`attnres_lit plan`: what a config would take on a layout, with neither the devices nor the data at hand."""

import json
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from attnres_lit.data.datamodule import TokenDataModule
from attnres_lit.parallel.cost_model import Hardware
from attnres_lit.parallel.plan import plan
from attnres_lit.parallel.settings import Cache, PipelineSettings, check_pipeline
from attnres_lit.parallel.show import table, timeline
from attnres_lit.training.module import LanguageModel


class Planner:
    """The subcommand, as a method of the Trainer."""

    def plan(
        self,
        model: LanguageModel,
        datamodule: TokenDataModule,
        pipeline_parallel_size: int | None = None,
        virtual_stages: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        cache_blocks: Cache | None = None,
        split_points: list[int] | None = None,
        data_parallel_size: int | None = None,
        fsdp_size: int | None = None,
        precision: str | int | None = None,
        device_flops: float = 4e14,
        memory_bandwidth: float = 3.35e12,
        link_bandwidth: float = 50e9,
        link_latency: float = 1e-5,
        out: str | None = None,
    ) -> None:
        """Parameters, FLOPs, memory, traffic and a simulated step of a layout; needs no accelerator and no data.

        What is null is taken from the trainer: its devices, nodes, strategy and precision. Without one: a single rank.

        Args:
            model: built without values.
            datamodule: says batch_size and seq_len.
            pipeline_parallel_size: ranks that share one copy of the model.
            virtual_stages: stages of every rank.
            num_microbatches: parts of a batch; null: one sequence each, and the whole batch on a single rank.
            schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS or InterleavedZeroBubble; null: 1F1B, or Interleaved1F1B
                with virtual stages.
            cache_blocks: whether ranks keep the sources that their later stages read; null: where that saves traffic.
            split_points: the first site of every stage but the first; null: stages of about equal FLOPs.
            data_parallel_size: copies of the whole model.
            fsdp_size: ranks that share the parameters of a stage.
            precision: of training.
            device_flops: FLOP/s that the matrix products of a rank reach, not the peak.
            memory_bandwidth: bytes/s of its memory.
            link_bandwidth: bytes/s that a rank sends at.
            link_latency: seconds from the end of a transfer to its arrival.
            out: folder for plan.json and timeline.png; null: the table alone.
        """
        virtual = 1 if virtual_stages is None else virtual_stages
        ranks = 1 if pipeline_parallel_size is None else pipeline_parallel_size
        settings = PipelineSettings(
            ranks,
            (datamodule.batch_size if ranks > 1 else 1) if num_microbatches is None else num_microbatches,
            schedule or ("Interleaved1F1B" if virtual > 1 else "1F1B"),
            virtual,
            "auto" if cache_blocks is None else cache_blocks,
        )
        check_pipeline(settings, compiled=model.compiled)
        numbers, step = plan(
            model.model,
            settings,
            Hardware(device_flops, memory_bandwidth, link_bandwidth, link_latency),
            datamodule.batch_size,
            datamodule.seq_len,
            precision or "32-true",
            1 if data_parallel_size is None else data_parallel_size,
            1 if fsdp_size is None else fsdp_size,
            split_points,
        )
        text = table(numbers)
        print(text)
        if out is not None:
            folder = Path(out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "plan.json").write_text(json.dumps(numbers, indent=2) + "\n")
            timeline(step, folder / "timeline.png", text.splitlines()[1].removeprefix("pipeline").strip())


def without_devices(config: Namespace) -> None:
    """Make a parsed config one that can be planned anywhere: its processes and precision become options of the plan."""
    for name, value in {**layout(config), "precision": config.trainer.precision}.items():
        if name in config and config[name] is None:
            config[name] = value
    config.trainer.update(
        Namespace(accelerator="cpu", devices=1, num_nodes=1, strategy="auto", precision=None, logger=False)
    )
    config.trainer.callbacks = []


def layout(config: Namespace) -> dict[str, Any]:
    """What the trainer's processes do, as options of the plan; those that it has already come first.

    A pipeline, of all processes unless its strategy has a size; its replicas, or all processes where there is no
    pipeline, hold copies of a model unless the strategy shards it over them, or over `data_parallel_size` of them.
    """
    asked, devices = config.trainer.strategy, config.trainer.devices
    options = dict(vars(asked.get("init_args") or Namespace())) if isinstance(asked, Namespace) else {}
    processes = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
    processes *= config.trainer.num_nodes
    ranks = config.pipeline_parallel_size or options.get("pipeline_parallel_size", 1)
    if not isinstance(ranks, int):  # auto
        ranks = processes
    replicas = max(1, processes // max(1, ranks))
    shards = options.get("fully_shard") or "data_parallel_size" in options or "fsdp" in str(asked).lower()
    shared = config.fsdp_size or (options.get("data_parallel_size") if shards else 1)
    if not isinstance(shared, int):  # null or auto
        shared = replicas
    copies = max(1, replicas // max(1, shared))
    return options | {"pipeline_parallel_size": ranks, "fsdp_size": shared, "data_parallel_size": copies}
