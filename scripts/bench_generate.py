"""Generation with every residual strategy beside PreNorm in the same process: latency of a token, prefill, memory.

    python scripts/bench_generate.py                              # decode at batch 1 and 8, prefill of 2048 tokens
    python scripts/bench_generate.py --what decode --rounds 200 --cases block full
    python scripts/bench_generate.py --what memory                # bytes held while a prompt is read, by chunk

Cases are as in bench_step.py. A round runs every case once; ratios are medians over rounds of the ratio within a round.
Decode is one token after `--past` others, with the key-value cache, from the token to its logits. Memory is the most
bytes alive at a time while a prompt is read, beyond the cache, the parameters and the logits.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from attnres_lit.inference.generate import prefill
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.kv_cache import KVCache
from bench_step import ours
from interleaved import MIB, paired_ratio, report, times

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def cache_for(model: Transformer, rows: int, slots: int) -> KVCache:
    """An empty cache."""
    parameter = next(model.parameters())
    return KVCache(model.config, rows, slots, parameter.dtype, parameter.device)


def decode_step(model: Transformer, rows: int, past: int) -> Callable[[], object]:
    """One token of each row after `past` others; the cache does not grow, so that all rounds do the same."""
    cache = cache_for(model, rows, past + 1)
    cache.advance([past] * rows)
    tokens = torch.randint(model.config.vocab_size, (rows, 1), device=cache.device)

    @torch.inference_mode()
    def step() -> object:
        return model(tokens, cache.past(1))

    return step


def prefill_step(model: Transformer, tokens: int, chunk: int) -> Callable[[], object]:
    """A prompt, up to the logits after its end."""
    prompt = torch.randint(model.config.vocab_size, (tokens,)).tolist()

    @torch.inference_mode()
    def step() -> object:
        return model.head(prefill(model, cache_for(model, 1, tokens), [prompt], chunk))

    return step


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes held at a time by tensors that the step makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto: Any = profiler.profiler  # the stored type lacks `nbytes`
    now = peak = 0
    for event in sorted(kineto.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def timed(
    models: dict[str, Transformer],
    make: Callable[[Transformer], Callable[[], object]],
    what: str,
    rounds: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """One row for every case."""
    taken = times({name: make(model) for name, model in models.items()}, rounds, clock=clock)
    return [
        {
            "what": what,
            "case": name,
            "x time": paired_ratio(taken[name], taken["prenorm"]),
            "ms": statistics.median(taken[name]) * 1e3,
            "fastest ms": min(taken[name]) * 1e3,
        }
        for name in models
    ]


def memory(models: dict[str, Transformer], tokens: int, chunks: list[int]) -> list[dict[str, Any]]:
    """Peak bytes of reading a prompt in chunks, beyond its cache."""
    rows = []
    for chunk in chunks:
        peaks = {}
        for name, model in models.items():
            held = cache_for(model, 1, tokens).nbytes
            peaks[name] = peak_bytes(prefill_step(model, tokens, chunk)) - held
        for name, peak in peaks.items():
            row = {"what": f"prefill of {tokens}", "chunk": chunk, "case": name, "peak MiB": peak / MIB}
            rows.append(row | {"beyond prenorm MiB": (peak - peaks["prenorm"]) / MIB})
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=["decode", "prefill", "memory"], default=["decode", "prefill"])
    parser.add_argument("--cases", nargs="+", default=["block", "full"], help="what to measure beside prenorm")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows of a decode")
    parser.add_argument("--past", type=int, default=128, help="tokens before the decoded one")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048], help="tokens read at a time")
    parser.add_argument("--rounds", type=int, default=60, help="of a decode; a tenth of them for a prefill")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of the thread, for a busy machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = TransformerConfig(
        args.vocab, args.dim, args.layers, args.heads, max_seq_len=max(args.tokens, args.past + 1)
    )
    models = {spec: ours(spec, config).to(args.device).eval() for spec in dict.fromkeys(["prenorm", *args.cases])}
    rows = []
    if "decode" in args.what:
        for batch in args.batches:
            make = partial(decode_step, rows=batch, past=args.past)
            rows += timed(models, make, f"decode, batch {batch}", args.rounds, CLOCKS[args.clock])
    if "prefill" in args.what:
        for chunk in args.chunks:
            make = partial(prefill_step, tokens=args.tokens, chunk=chunk)
            rows += timed(
                models,
                make,
                f"prefill of {args.tokens} in chunks of {chunk}",
                max(3, args.rounds // 10),
                CLOCKS[args.clock],
            )
    settings = {key: value for key, value in vars(args).items() if key not in ("cases", "json", "what")}
    if rows:
        report(rows, settings, args.json)
    if "memory" in args.what:
        report(memory(models, args.tokens, args.chunks), settings, args.json)


if __name__ == "__main__":
    main()
