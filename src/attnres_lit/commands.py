"""The subcommands that need no training config: generate, evaluate, export, inspect, sweep, report."""

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from attnres_lit.checks import explain
from attnres_lit.inference.evaluate import split_perplexity
from attnres_lit.inference.export import export as write_export
from attnres_lit.inference.export import family_of
from attnres_lit.inference.generate import PREFILL_CHUNK
from attnres_lit.inference.inspect import look_inside
from attnres_lit.inference.load import load
from attnres_lit.inference.page import write as write_page
from attnres_lit.inference.sampling import Sampling
from attnres_lit.inference.text import Step, complete
from attnres_lit.parallel.checkpoint import describe
from attnres_lit.residual import PreNorm


class Command(argparse.ArgumentParser):
    """What these subcommands share; an error is a ValueError, which the command line prints in one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"attnres_lit {name}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and which option is nearest."""
        raise ValueError(explain(message, self))

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """The options, which may be spelt with dashes too."""
        return self.parse_args([self._with_underscores(arg) for arg in args])

    def _with_underscores(self, arg: str) -> str:
        """A known option that was spelt with dashes; anything else as it is."""
        name, equals, value = arg.partition("=")
        spelt = "--" + name[2:].replace("-", "_")
        return spelt + equals + value if spelt in self._option_string_actions else arg


class Parser(Command):
    """Of the subcommands that load a model."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(name, description)
        self.add_argument("--ckpt_path", required=True, metavar="CKPT", help="a checkpoint that fit wrote")
        self.add_argument("--device", default="auto", help="cpu, cuda, ...; by default the GPU if there is one")
        self.add_argument("--num_threads", type=int, default=1, help="of torch, on the CPU (default: %(default)s)")

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """The options; sets the threads of torch, and makes the device one."""
        options = super().parse(args)
        if options.num_threads < 1:
            raise ValueError(f"--num_threads {options.num_threads} must be at least 1")
        torch.set_num_threads(options.num_threads)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
        try:
            options.device = torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # of a backend that is not there
            reason = re.split(r"[.:\n]", str(error))[0]
            raise ValueError(f"--device {name} cannot be used: {reason}") from None
        return options


def generate(args: Sequence[str]) -> None:
    """Continue prompts: text to stdout, figures to stderr."""
    parser = Parser("generate", "Continue prompts with a trained model.")
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="what to continue; several: one batch")
    add("--prompt_file", action="append", default=[], metavar="FILE", help="a prompt in a file, or - for stdin")
    add("--interactive", action="store_true", help="ask for one prompt after another")
    add("--max_new_tokens", type=int, default=256, help="at most, for each prompt (default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token (default: %(default)s)")
    add("--top_k", type=int, help="draw from this many most likely tokens")
    add("--top_p", type=float, default=1.0, help="draw from the fewest tokens that have this probability")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: against tokens that are there already")
    add("--seed", type=int, default=0, help="prompt i draws with seed + i")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text to end before; several: whichever is first")
    add(
        "--prefill_chunk",
        type=int,
        default=PREFILL_CHUNK,
        help="tokens of the prompts read at a time (default: %(default)s)",
    )
    options = parser.parse(args)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed)
    if options.interactive and (options.prompt or options.prompt_file):
        raise ValueError("--interactive asks for its prompts: leave --prompt and --prompt_file out")
    prompts = [*options.prompt, *map(_read, options.prompt_file)]
    model, tokenizer, seq_len, _ = load(options.ckpt_path, options.device)

    def reply(prompts: Sequence[str], echo: bool) -> None:
        limits = (options.max_new_tokens, sampling, options.stop, options.prefill_chunk)
        _show(prompts, complete(model, tokenizer, prompts, *limits), echo)
        longest = max(len(tokenizer.encode(prompt)) for prompt in prompts) + options.max_new_tokens
        if longest > seq_len:
            sys.stderr.write(f"[trained on {seq_len} tokens at a time: what comes after them may be worse]\n")

    if options.interactive:
        for prompt in _asked():
            reply([prompt], echo=False)
    else:
        reply(prompts or [_read("-")], echo=True)


def _asked() -> Iterator[str]:
    """What a user types, line by line, until the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def _read(path: str) -> str:
    """The text of a file, or of stdin, without the newline at its end. Raises ValueError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file {path} cannot be read: {error}") from None
    return text.removesuffix("\n")


def _show(prompts: Sequence[str], steps: Iterator[Step], echo: bool) -> None:
    """Print one continuation while it grows, several once all are there; then the speed, to stderr."""
    texts = list(prompts) if echo else [""] * len(prompts)
    times, tokens = [time.perf_counter()], 0
    for text, count in steps:
        times.append(time.perf_counter())
        tokens += count
        for row, piece in text.items():
            texts[row] += piece
        if len(texts) == 1:
            print(texts[0], end="", flush=True)
            texts[0] = ""
    print(*([""] if len(texts) == 1 else (f"==> {row} <==\n{text}" for row, text in enumerate(texts, 1))), sep="\n")
    start, first, *_, last = times
    speed = max(0, tokens - len(texts)) / max(last - first, 1e-9)
    sys.stderr.write(f"[{tokens} tokens: the first after {first - start:.2f} s, then {speed:.0f} tokens/s]\n")


def evaluate(args: Sequence[str]) -> None:
    """Perplexity and bits per byte of the documents of a prepared corpus, or the tasks of lm-eval."""
    parser = Parser("evaluate", "Perplexity of whole documents, through a sliding window, or tasks of lm-eval.")
    add = parser.add_argument
    add("--data_dir", metavar="DIR", help="a folder that prepare made, with the model's tokenizer")
    add("--split", default="val", help="of it: val or train (default: %(default)s)")
    add("--window", type=int, help="tokens that the model reads at a time; by default as many as in training")
    add("--stride", type=int, help="tokens by which the window slides; by default half the window")
    add("--limit", type=int, help="documents to read, or requests of each task, the first ones")
    add("--tasks", metavar="NAMES", help="tasks of lm-eval, with commas between them")
    add("--tasks_dir", metavar="DIR", help="a folder with tasks of your own, as YAML")
    add("--num_fewshot", type=int, help="examples before each request; by default as the task says")
    add("--batch_size", type=int, default=8, help="requests of tasks at a time (default: %(default)s)")
    options = parser.parse(args)
    if (options.data_dir is None) == (options.tasks is None):
        raise ValueError("evaluate takes one of --data_dir and --tasks")
    if options.tasks is not None:
        _evaluate_tasks(options)
        return
    model, tokenizer, seq_len, _ = load(options.ckpt_path, options.device)
    window = seq_len if options.window is None else options.window
    found = split_perplexity(model, tokenizer, options.data_dir, options.split, options.limit, window, options.stride)
    for name, value in (
        ("documents", f"{found.documents:,}"),
        ("tokens", f"{found.tokens:,}"),
        ("bytes", f"{found.bytes:,}"),
        ("loss", f"{found.loss:.4f}"),
        ("ppl", f"{found.perplexity:.4f}"),
        ("bpb", f"{found.bits_per_byte:.4f}"),
    ):
        print(f"{name:10}{value:>14}")


def _evaluate_tasks(options: argparse.Namespace) -> None:
    """Print lm-eval's own table."""
    try:
        from lm_eval.utils import make_table

        from attnres_lit.inference.lm_eval import run_tasks
    except ImportError as error:
        raise ValueError(f"--tasks needs lm-eval ({error}): pip install 'attnres_lit[eval]'") from None
    model, tokenizer, *_ = load(options.ckpt_path, options.device)
    names = [name for name in options.tasks.split(",") if name]
    found = run_tasks(
        model, tokenizer, names, options.tasks_dir, options.num_fewshot, options.limit, options.batch_size
    )
    print(make_table(found))


def export(args: Sequence[str]) -> None:
    """Write a checkpoint as a folder that transformers loads."""
    parser = Parser("export", "Write a model as a folder that Hugging Face's transformers loads.")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder, which must not exist")
    parser.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16 or float16")
    options = parser.parse(args)
    model, tokenizer, *_ = load(options.ckpt_path)
    residual = describe(options.ckpt_path)["hyper_parameters"]["residual"]
    write_export(model, residual, tokenizer, options.out, options.dtype)
    plain = family_of(model.config) if type(model.residual) is PreNorm else None
    print(f"{options.out}: " + (f"a {plain} model" if plain else "needs attnres_lit and trust_remote_code=True"))


def inspect(args: Sequence[str]) -> None:
    """Show where the parameters are and what depth does with a text, as pictures and a page."""
    parser = Parser("inspect", "A look inside a trained model: parameters, depth-attention weights, output sizes.")
    parser.add_argument("--prompt", metavar="TEXT", help="what the model reads; by default, what it writes itself")
    parser.add_argument("--out", default="inspect", metavar="DIR", help="for the results (default: %(default)s)")
    options = parser.parse(args)
    model, tokenizer, _, step = load(options.ckpt_path, options.device)
    insight = look_inside(model, tokenizer, options.prompt)
    hparams = describe(options.ckpt_path)["hyper_parameters"]
    residual = hparams["residual"]
    facts = {
        "checkpoint": options.ckpt_path,
        "optimizer steps": f"{step:,}",
        "residual": " ".join([residual["class_path"], *(f"{k}={v}" for k, v in residual["init_args"].items())]),
        **hparams["config"],
    }
    written = write_page(options.out, insight, f"Inside {Path(options.ckpt_path).name}", facts)
    total = sum(insight.parameters.values())
    for part, count in {**insight.parameters, "total": total}.items():
        print(f"{part:10}{count:>14,}{count / total:>9.2%}")
    print(*written, sep="\n")


def sweep(args: Sequence[str]) -> None:
    """Train the runs of a YAML that names a base config, axes and a budget."""
    parser = Command("sweep", "Train every cell of a sweep; what is finished is skipped, what was interrupted goes on.")
    add = parser.add_argument
    add("config", metavar="CONFIG", help="of the sweep, for example configs/experiment/ablation.yaml")
    add("--runs_dir", metavar="DIR", help="where the runs live (default: runs/<name of CONFIG>)")
    add("--jobs", type=int, default=1, help="processes at a time; of several GPUs each has one (default: %(default)s)")
    add("--cells", type=int, nargs="+", metavar="NUMBER", help="only these, counted from 0")
    add("--dry_run", action="store_true", help="print the cells and what they take, and train nothing")
    add("--slurm", action="store_true", help="write a script for a SLURM job array, and train nothing")
    options = parser.parse(args)
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs} must be at least 1")
    from attnres_lit.sweeping import sweep as train  # which reads configs as the command line does, and that needs us

    train(options.config, options.runs_dir, options.jobs, options.cells, options.dry_run, options.slurm)


def report(args: Sequence[str]) -> None:
    """Put runs side by side: curves, final values, fits and what happens along depth, beside the report's numbers."""
    parser = Command("report", "A page, Markdown and pictures of what the runs below some folders hold.")
    add = parser.add_argument
    add("runs", metavar="RUNS", nargs="+", type=Path, help="folders of runs, such as a sweep's, or of single runs")
    add("--out", metavar="DIR", type=Path, help="for the report (default: <first RUNS>/report)")
    add("--metric", default="val/loss", help="to compare (default: %(default)s)")
    add("--baseline", metavar="NAME", help="of the differences (default: PreNorm, or else the first run)")
    add("--at_loss", metavar="L", type=float, help="loss at which the computes of fits are compared")
    options = parser.parse(args)
    if options.at_loss is not None and not options.at_loss > 0:
        raise ValueError(f"--at_loss {options.at_loss} must be above 0")
    from attnres_lit.experiments.report import report as write  # pandas and scipy take a while to import

    asked = (options.metric, options.baseline, options.at_loss, shlex.join(["attnres_lit", "report", *args]))
    print(*write(options.runs, options.out or options.runs[0] / "report", *asked), sep="\n")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "generate": generate,
    "evaluate": evaluate,
    "export": export,
    "inspect": inspect,
    "sweep": sweep,
    "report": report,
}
