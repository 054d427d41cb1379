"""`attnres_lit sweep`: the cells of a YAML, what they cost, and their runs."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import Namespace

from attnres_lit.checks import check_config, explain
from attnres_lit.cli import CLI, Parser, without_values
from attnres_lit.experiments.cells import Budget, Cell, Sweep, read_sweep
from attnres_lit.experiments.sweep import QUIET, Job, done, run
from attnres_lit.parallel.cost_model import flops, parameters
from attnres_lit.planning import layout
from attnres_lit.retrofit import follow_checkpoint
from attnres_lit.training.module import LanguageModel

TRIAL = 5e10  # FLOPs of the step that is timed
OF_A_PLACE = (
    "name",
    "runs_dir",
    "ckpt_path",
    "config",
    "num_threads",
    "weights_only",
    "__path__",
)  # options that change no number


class RaisingParser(Parser):
    """An error is a ValueError: there is more to say than what is wrong, namely with which cell."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say it in one line."""
        raise ValueError(explain(message, self))


class Reader(CLI):
    """Reads the arguments of `fit` as `fit` does, again and again, and runs nothing."""

    parser_class = RaisingParser

    def __init__(self) -> None:
        super().__init__([])
        self.parser.add_instantiator(without_values, LanguageModel, prepend=True)  # pyrefly: ignore[deprecated]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """`fit` alone."""
        return {"fit": CLI.subcommands()["fit"]}

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Nothing yet."""
        self.config = Namespace(subcommand="fit", fit=Namespace(seed_everything=False))

    def before_instantiate_classes(self) -> None:
        """Nothing yet."""

    def instantiate_classes(self) -> None:
        """Nothing yet."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""

    def read(self, arguments: Sequence[str]) -> Namespace:
        """The config of a run. Raises ValueError."""
        config = self.parser.parse_args(["fit", *arguments]).fit
        follow_checkpoint(config)
        check_config(config, self._parser("fit").get_defaults())
        return config

    def build(self, config: Namespace) -> tuple[LanguageModel, Any]:
        """The model, without values, and the data module of a config."""
        built = self.parser.instantiate(Namespace(subcommand="fit", fit=config.clone()))["fit"]
        return built.model, built.data


@dataclass(frozen=True)
class Cost:
    """A job, and what it takes.

    Args:
        job: the cell, ready to be trained.
        parameters: of the whole model.
        tokens: of training.
        flops: of training, forward and backward.
        strategy: what makes its FLOPs fast or slow: the residual with its options.
    """

    job: Job
    parameters: int
    tokens: int
    flops: float
    strategy: str


def costs(sweep: Sweep, runs_dir: Path, reader: Reader) -> list[Cost]:
    """What every cell takes.

    Raises:
        ValueError: a cell cannot be run, or its folder holds a run with other settings.
    """
    found = []
    for cell in sweep.cells:
        try:
            arguments = sweep.arguments(cell)
            config = reader.read(arguments)
            model, data = reader.build(config)
            counts = parameters(model.model, model.model.residual.num_sites)
            per_step = data.batch_size * data.seq_len * config.trainer.accumulate_grad_batches * replicas(config)
            per_token = flops(model.model.config, data.seq_len, again=False).training
            steps = cell.budget.num_steps(sum(counts.sublayers), per_step, per_token)
            arguments += schedule(cell.budget, config, steps)
            check_settings(cell, arguments)
            check_same(reader, arguments, runs_dir / cell.name)
        except ValueError as error:
            raise ValueError(f"cell {cell.name}: {error}") from error
        job = Job(cell.name, arguments, steps)
        found.append(
            Cost(job, counts.total, steps * per_step, steps * per_step * per_token, str(config.model.residual))
        )
    return found


def replicas(config: Namespace) -> int:
    """Data-parallel ranks, each with batches of its own."""
    ranks = layout(Namespace(trainer=config.trainer, pipeline_parallel_size=None, fsdp_size=None))
    return ranks["fsdp_size"] * ranks["data_parallel_size"]


def schedule(budget: Budget, config: Namespace, steps: int) -> list[str]:
    """Options of `fit` that make a run as long as the budget says."""
    between = steps // budget.validations * config.trainer.accumulate_grad_batches  # counted in batches
    return [
        f"--trainer.max_steps={steps}",
        f"--trainer.val_check_interval={between}",
        f"--model.optim.total_steps={steps}",
        f"--model.optim.warmup_steps={round(budget.warmup * steps)}",
    ]


def check_settings(cell: Cell, arguments: Sequence[str]) -> None:
    """Refuse options that a sweep sets for every cell. Raises ValueError."""
    for key in cell.settings:
        if key in OF_A_PLACE or sum(each.startswith(f"--{key}=") for each in arguments) > 1:
            raise ValueError(f"{key} is set by the sweep, from the budget and the names of the cells: leave it out")


def check_same(reader: Reader, arguments: Sequence[str], folder: Path) -> None:
    """Refuse to take a run of other settings for a part of the sweep. Raises ValueError."""
    saved = folder / "config.yaml"
    if not saved.is_file():
        return
    here, there = (flat(reader.read(each)) for each in ([*arguments, QUIET], ["--config", str(saved)]))
    for key in sorted(here.keys() | there.keys()):
        if key.rpartition(".")[2] not in OF_A_PLACE and here.get(key) != there.get(key):
            raise ValueError(
                f"{folder} holds a run with {key}={there.get(key)}, not {here.get(key)}: choose another --runs_dir, or "
                "move it away"
            )


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A parsed config by dotted key."""
    if not isinstance(config, Namespace):
        return {prefix: config}
    return {
        name: value
        for key, part in vars(config).items()
        for name, value in flat(part, f"{prefix}.{key}" if prefix else key).items()
    }


def speeds(found: Sequence[Cost], reader: Reader) -> dict[str, float]:
    """FLOP/s that the smallest model of each strategy reaches here, in a training step of a few sequences."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates: dict[str, float] = {}
    for each in sorted(found, key=lambda cost: cost.flops / cost.tokens):
        if each.strategy not in rates:
            model, data = reader.build(reader.read(each.job.arguments))
            model.configure_model()
            model.to(device)
            per_token = each.flops / each.tokens
            length = min(data.seq_len, 1 + int(TRIAL / per_token))
            rows = min(data.batch_size, 1 + int(TRIAL / per_token / length))
            batch = torch.zeros(rows, length + 1, dtype=torch.int64, device=device)
            took = []
            for _ in range(3):  # the first has to set up
                start = time.perf_counter()
                loss = model.nats(batch, "mean")
                loss.backward()
                loss.item()
                took.append(time.perf_counter() - start)
            rates[each.strategy] = per_token * rows * length / min(took)
    return rates


def table(found: Sequence[Cost], rates: dict[str, float], runs_dir: Path, at_once: int) -> str:
    """The cells with what they take and how far they are, and the total."""
    lines = [["cell", "parameters", "steps", "tokens", "FLOPs", "time", "state"]]
    total = left = 0.0
    for each in found:
        behind, steps = done(runs_dir / each.job.name), each.job.steps
        state = "new" if behind is None else "finished" if behind >= steps else f"at step {behind:,}"
        seconds = each.flops / rates[each.strategy]
        total += seconds
        left += seconds * max(0.0, 1 - (behind or 0) / steps)
        numbers = [f"{each.parameters:,}", f"{steps:,}", f"{each.tokens:.3g}", f"{each.flops:.3g}", clock(seconds)]
        lines.append([each.job.name, *numbers, state])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = (
        "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:-1]), state])
        for name, *numbers, state in lines
    )
    work = sum(each.flops for each in found)
    times = (
        f"about {clock(total / at_once)} on this machine with --jobs {at_once}, {clock(left / at_once)} of them left"
    )
    return "\n".join([*rows, f"{len(found)} cells, {work:.3g} FLOPs, {times}; start-up and validation not counted"])


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def array_script(config: str, runs_dir: Path, cells: Sequence[int]) -> str:
    """A SLURM job array with a task for each of the cells; one that is requeued goes on from its checkpoint."""
    words = [sys.executable, "-m", "attnres_lit", "sweep", config, "--runs_dir", str(runs_dir)]
    return f"""#!/bin/bash
# sbatch this from {Path.cwd()}; time, partition and GPUs are yours to add
#SBATCH --job-name={runs_dir.name}
#SBATCH --array={",".join(map(str, cells))}
#SBATCH --output={runs_dir}/logs/slurm-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
exec {shlex.join(words)} --cells "$SLURM_ARRAY_TASK_ID"
"""


def sweep(
    config: str, runs_dir: str | None, at_once: int, cells: Sequence[int] | None, dry_run: bool, slurm: bool
) -> None:
    """See `commands.sweep`."""
    read = read_sweep(Path(config))
    folder = Path(runs_dir or Path("runs") / Path(config).stem)
    reader = Reader()
    found = costs(read, folder, reader)
    chosen = range(len(found)) if cells is None else sorted(set(cells))
    if beyond := [number for number in chosen if not 0 <= number < len(found)]:
        raise ValueError(f"--cells {beyond[0]}: the cells are 0 to {len(found) - 1}")
    found = [found[number] for number in chosen]
    if dry_run:
        print(table(found, speeds(found, reader), folder, at_once))
    elif slurm:
        script = folder / "sweep.sbatch"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        script.write_text(array_script(config, folder, chosen))
        print(f"sbatch {script}")
    else:
        failed = run([each.job for each in found], folder, at_once)
        print(f"{folder}: {len(found) - len(failed)} of {len(found)} cells are finished")
        if failed:
            raise ValueError(f"{len(failed)} failed: {', '.join(failed)}; the same command tries them again")
