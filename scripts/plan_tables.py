"""The tables of docs/parallelism.md: what crosses the stages of a pipeline, and what that costs in time.

python scripts/plan_tables.py
"""

import argparse
from functools import partial

import torch

from attnres_lit.model import ResidualFactory, Transformer, TransformerConfig
from attnres_lit.parallel.cost_model import Hardware, boundaries
from attnres_lit.parallel.depth import trace
from attnres_lit.parallel.plan import plan
from attnres_lit.parallel.settings import PipelineSettings
from attnres_lit.residual import BlockAttnRes, PreNorm


def tensors() -> None:
    """Sources that cross all boundaries of a microbatch, for one block a stage."""
    layouts = [(ranks, virtual) for ranks in (2, 4, 8) for virtual in (1, 2, 4)]
    rows: dict[str, list[int]] = {"naive": [], "received": [], "exact": []}
    for ranks, virtual in layouts:
        stages = [range(site, site + 1) for site in range(ranks * virtual)]
        found = boundaries(trace(BlockAttnRes(len(stages), 1, num_blocks=len(stages))), stages, ranks)
        for name, row in rows.items():
            row.append(sum(getattr(each, name) for each in found))
    print(markdown("", [f"P{ranks} V{virtual}" for ranks, virtual in layouts]))
    names = {"naive": "naive", "received": "Eq. 8", "exact": "ours"}
    for name, row in rows.items():
        print(markdown(names[name], row, head=False))


def overhead(args: argparse.Namespace, link_bandwidth: float) -> None:
    """Step time of Block AttnRes over PreNorm, in percent."""
    config = TransformerConfig(args.vocab, args.dim, args.layers, args.heads, max_seq_len=args.tokens)
    hardware = Hardware(args.device_flops, args.memory_bandwidth, link_bandwidth, args.link_latency)
    virtual = (1, 2, 4, 8)

    def seconds(residual: ResidualFactory, stages: int, cache: bool) -> float:
        settings = PipelineSettings(
            args.ranks, args.microbatches, "Interleaved1F1B", stages, "auto" if cache else False
        )
        with torch.device("meta"):
            model = Transformer(config, residual)
        return plan(model, settings, hardware, args.microbatches, args.tokens).step.seconds

    block = partial(BlockAttnRes, num_blocks=args.blocks)
    rows: dict[str, list[str]] = {"PreNorm, ms": [], "Block, naive": [], "Block, cached": []}
    for stages in virtual:
        base = seconds(PreNorm, stages, False)
        rows["PreNorm, ms"].append(f"{base * 1e3:.0f}")
        for name, cache in (("Block, naive", False), ("Block, cached", True)):
            rows[name].append(f"+{seconds(block, stages, cache) / base - 1:.1%}")
    print(markdown(f"{link_bandwidth / 1e9:g} GB/s", [f"{args.ranks * each} stages" for each in virtual]))
    for name, row in rows.items():
        print(markdown(name, row, head=False))


def markdown(name: str, cells: list[str] | list[int], head: bool = True) -> str:
    """A row of a table."""
    row = f"| {' | '.join(map(str, (name, *cells)))} |"
    return f"{row}\n|---{'|---' * len(cells)}|" if head else row


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence; a microbatch is one")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--device_flops", type=float, default=4e14)
    parser.add_argument("--memory_bandwidth", type=float, default=3.35e12)
    parser.add_argument("--link_latency", type=float, default=1e-5)
    parser.add_argument("--link_bandwidth", type=float, nargs="+", default=[400e9, 50e9, 12.5e9])
    args = parser.parse_args()
    tensors()
    for bandwidth in args.link_bandwidth:
        print()
        overhead(args, bandwidth)


if __name__ == "__main__":
    main()
