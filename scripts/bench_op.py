"""Depth attention alone, forward and backward, against stack + einsum in the same process.

    python scripts/bench_op.py                            # 8 sources of (4, 512, 512), fp32
    python scripts/bench_op.py --sources 7 --shape 4 256 256 --dtype bf16
    python scripts/bench_op.py --inductor                 # also the formula under torch.compile
    python scripts/bench_op.py --peers                    # also other packages, see scripts/peers.txt
    python scripts/bench_op.py --device cuda --dtype bf16 --inductor

Error: largest difference of output and gradients to the formula in float64, relative to the largest entry. Extra: bytes
held between forward and backward beside the sources.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from attnres_lit.ops import Backend, depth_attention, depth_attention_reference
from attnres_lit.ops.backends import EXTRAS, INSTALLED
from interleaved import MIB, memory, paired_ratio, report, times

Operator = Callable[[list[Tensor], Tensor, Tensor], Tensor]


def stack_einsum(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """The report's pseudo-code."""
    values = torch.stack(sources)
    keys = torch.nn.functional.rms_norm(values.float(), gain.shape, gain, 1e-6)
    weights = torch.einsum("d,sbtd->sbt", query, keys).softmax(0)
    return torch.einsum("sbt,sbtd->btd", weights, values.float()).to(values.dtype)


def read(backend: Backend, sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """Ours."""
    return depth_attention(sources, query, gain, backend=backend)


def operators(args: argparse.Namespace) -> dict[str, Operator]:
    """What to measure, the baseline first."""
    found: dict[str, Operator] = {"stack + einsum": stack_einsum}
    runnable: list[Backend] = ["eager", *(backend for backend in INSTALLED if EXTRAS[backend][2] == args.device)]
    for backend in runnable:
        found[backend] = partial(read, backend)
    if args.inductor:
        found["torch.compile(stack + einsum)"] = torch.compile(stack_einsum)
        found["torch.compile(eager)"] = torch.compile(partial(read, "eager"))
    if args.peers:
        from attn_res import AttnResOperator
        from fla.ops.attnres import naive_attnres

        if args.device == "cuda":
            from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op

            found["flash-attn-res phase 1"] = lambda s, q, g: phase_1_batched_attention_triton_op(
                torch.stack(s), (q * g).unsqueeze(0), 1e-6
            )[0][0]
        found["fla naive_attnres"] = lambda s, q, g: naive_attnres(q, s, g)
        module = AttnResOperator(args.shape[-1]).to(args.device)
        found["attn-res AttnResOperator"] = lambda s, q, g: functional_call(
            module, {"pseudo_query": q * g}, torch.stack(s)
        )
    return found


def error(operator: Operator, inputs: tuple[list[Tensor], Tensor, Tensor], probe: Tensor) -> float:
    """Relative to the float64 formula, over output and all gradients."""
    sources, query, gain = inputs
    exact = [t.detach().double().requires_grad_() for t in (*sources, query, gain)]
    results = []
    for function, (*s, q, g) in ((operator, (*sources, query, gain)), (depth_attention_reference, exact)):
        out = function(s, q, g)
        assert isinstance(out, Tensor)
        results.append([out, *torch.autograd.grad(out, [*s, q, g], probe.to(out.dtype))])
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=3, default=[4, 512, 512], metavar=("B", "T", "D"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inductor", action="store_true", help="also under torch.compile: a minute of compilation")
    parser.add_argument("--peers", action="store_true", help="also what pip can install, see scripts/peers.txt")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    options = {"device": args.device, "requires_grad": True}
    sources = [torch.randn(args.shape, dtype=dtype, **options) for _ in range(args.sources)]
    query, gain = torch.randn(args.shape[-1], **options), torch.ones(args.shape[-1], **options)
    probe, inputs = torch.randn_like(sources[0]), (sources, query, gain)

    def step(operator: Operator) -> Callable[[], object]:
        return lambda: torch.autograd.grad(operator(*inputs), sources, probe)

    found = operators(args)
    taken = times({name: step(operator) for name, operator in found.items()}, args.rounds)
    baseline = taken["stack + einsum"]
    rows = []
    for name, operator in found.items():
        held, _ = memory(lambda operator=operator: (operator(*inputs) * probe).sum())  # keeps the probe, not the result
        rows.append(
            {
                "operator": name,
                "x faster": paired_ratio(baseline, taken[name]),
                "ms": statistics.median(taken[name]) * 1e3,
                "extra MiB": held / MIB,
                "error": error(operator, inputs, probe),
            }
        )
    report(rows, {key: value for key, value in vars(args).items() if key != "json"}, args.json)


if __name__ == "__main__":
    main()
