"""Forward and backward of the whole model: every residual strategy, as a ratio to PreNorm in the same process.

    python scripts/bench_step.py                                    # all strategies, a small model
    python scripts/bench_step.py --cases block block:two_phase=false full --dim 512 --tokens 512
    python scripts/bench_step.py --decode --dim 512                 # one token, batch 1, without gradients
    python scripts/bench_step.py --peers                            # beside what pip can install: scripts/peers.txt
    python scripts/bench_step.py --device cuda --layers 24 --dim 1024 --tokens 2048 --dtype bf16 --compile model

A case is a file of configs/residual and options of it or of the Transformer: `block:num_blocks=4,depth_backend=eager`.
Ratios are medians over rounds of the ratio within a round. Saved: bytes of tensors held between forward and backward.
Peak: most bytes held at a time in a step, gradients included. Both beyond the parameters.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from attnres_lit.model import Transformer, TransformerConfig
from interleaved import MIB, memory, paired_ratio, report, times

CONFIGS = Path(__file__).parents[1] / "configs" / "residual"
OF_MODEL = ("checkpoint_activations", "depth_backend", "fp32_residual")
CASES = ["prenorm", "denseformer", "mhc", "full", "block", "block:checkpoint_activations=read", "block:two_phase=false"]


@dataclass
class Case:
    """A model to measure, and the name of the one it is measured against."""

    model: nn.Module
    baseline: str


def ours(spec: str, config: TransformerConfig) -> Transformer:
    """The model of a case."""
    name, _, rest = spec.partition(":")
    options = {key: yaml.safe_load(value) for key, value in (item.split("=") for item in rest.split(",") if item)}
    file = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    module, _, class_name = file["class_path"].rpartition(".")
    of_model = {key: options.pop(key) for key in OF_MODEL if key in options}
    residual = partial(getattr(import_module(module), class_name), **file.get("init_args", {}) | options)
    return Transformer(config, residual, **of_model)


def training_step(model: nn.Module, tokens: Tensor, autocast: Callable[[], Any]) -> tuple[Callable, Callable]:
    """The loss of a model, and a step of forward and backward."""

    def loss() -> Tensor:
        with autocast():
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    return loss, step


def decode_step(model: nn.Module, tokens: Tensor, autocast: Callable[[], Any]) -> Callable:
    """The forward of a single token."""

    def step() -> Tensor:
        with torch.inference_mode(), autocast():
            return model(tokens[:1, :1])

    return step


def measure(cases: dict[str, Case], tokens: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for every case."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    autocast = partial(torch.autocast, args.device, dtype, enabled=args.dtype != "fp32")
    steps, losses = {}, {}
    for name, case in cases.items():
        if args.decode:
            steps[name] = decode_step(case.model, tokens, autocast)
        else:
            losses[name], steps[name] = training_step(case.model, tokens, autocast)
    taken = times(steps, args.rounds)
    held = {}
    for name, loss in losses.items():
        held[name] = memory(loss)
        cases[name].model.zero_grad(set_to_none=True)
    rows = []
    for name, case in cases.items():
        seconds = statistics.median(taken[name])
        row = {"case": name, "x time": paired_ratio(taken[name], taken[case.baseline]), "ms": seconds * 1e3}
        if not args.decode:
            (saved, peak), (saved_before, peak_before) = held[name], held[case.baseline]
            row |= {"tokens/s": int(tokens[:, 1:].numel() / seconds)}
            row |= {"x saved": saved / saved_before, "saved MiB": saved / MIB}
            row |= {"x peak": peak / peak_before, "peak MiB": peak / MIB}
        rows.append(row | {"against": case.baseline})
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="what to measure beside prenorm")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compile", choices=["sublayers", "model"], help="all but peers; model: depth attention by Inductor too"
    )
    parser.add_argument("--decode", action="store_true", help="one token, batch 1, without gradients")
    parser.add_argument("--peers", action="store_true", help="also what pip can install, see scripts/peers.txt")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = TransformerConfig(args.vocab, args.dim, args.layers, args.heads, max_seq_len=args.tokens)
    models = {spec: ours(spec, config) for spec in dict.fromkeys(["prenorm", *args.cases])}
    for model in models.values():
        for part in {"sublayers": model.sublayers.values(), "model": [model]}.get(args.compile, []):
            part.compile()
    cases = {spec: Case(model, "prenorm") for spec, model in models.items()}
    if args.peers:
        from peers import peers

        cases |= {name: Case(model, baseline) for name, model, baseline in peers(config)}
    for case in cases.values():
        case.model.to(args.device)
    tokens = torch.randint(args.vocab, (args.batch, args.tokens + 1), device=args.device)
    rows = measure(cases, tokens, args)
    report(rows, {key: value for key, value in vars(args).items() if key not in ("cases", "json")}, args.json)


if __name__ == "__main__":
    main()
