"""What the forward pass of a stage keeps for the backward pass, in bytes per token.

Sublayers are counted from their formulas, with fused norms and fused attention. The residual is measured: its strategy
runs on one token and on two, and what autograd keeps more of for the second is counted, every storage once; so a
strategy written tomorrow counts as well. A microbatch that is read in two phases because it is large ("auto") keeps the
statistics of phase 1 beside that.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from attnres_lit.model.config import TransformerConfig
from attnres_lit.model.recompute import Again
from attnres_lit.parallel.depth import Depth, tensors_of
from attnres_lit.residual.base import Residual, Sources

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes; half precisions weigh the same


@dataclass(frozen=True)
class Precision:
    """Bytes of a number, by what it is.

    Args:
        parameter: of parameters, gradients and the moments of the optimizer.
        compute: of what sublayers compute with.
        source: of sources and partial.
    """

    parameter: int
    compute: int
    source: int

    @classmethod
    def of(cls, name: str | int, fp32_residual: bool = False) -> "Precision":
        """Of a precision as Lightning names it.

        Raises:
            ValueError: an unknown name.
        """
        bits, _, mode = str(name).removeprefix("bf").partition("-")
        if bits not in ("16", "32", "64") or mode not in ("", "true", "mixed") or (bits != "16" and mode == "mixed"):
            raise ValueError(f"unknown precision {name}: bf16-mixed, 16-mixed, bf16-true, 16-true, 32-true or 64-true")
        compute = int(bits) // 8
        mixed = compute == 2 and mode != "true"
        return cls(4 if mixed else compute, compute, 4 if mixed and fp32_residual else compute)


def sublayer_bytes(config: TransformerConfig, precision: Precision) -> list[int]:
    """Kept by every sublayer beside its input: the norm's output, projections, attention, products.

    Args:
        config: sizes.
        precision: bytes of a number.
    """
    dim, kv_heads = config.dim, config.num_kv_heads or config.num_heads
    q_dim, kv_dim = config.head_width * config.num_heads, config.head_width * kv_heads
    # autocast narrows a wide norm output once for every projection that reads it
    wide = precision.source > precision.compute
    q_k_v, gate_up = (3 * dim, 2 * dim) if wide else (dim, dim)
    statistics = 4  # the norm's reciprocal RMS
    attention = (q_k_v + 2 * q_dim + 2 * kv_dim) * precision.compute + 4 * config.num_heads + statistics
    if config.qk_norm:  # their inputs, and a reciprocal RMS of every head
        attention += (q_dim + kv_dim) * precision.compute + 4 * (config.num_heads + kv_heads)
    mlps = [(gate_up + 4 * width) * precision.compute + statistics for width in config.mlp_dims]
    return [kept for mlp in mlps for kept in (attention, mlp)]


def head_bytes(config: TransformerConfig, precision: Precision) -> int:
    """Kept by the final norm, the head and the loss: two inputs, and log-probabilities in at least fp32."""
    return 2 * config.dim * precision.source + config.vocab_size * max(4, precision.compute)


def residual_bytes(residual: Residual, stages: Sequence[range], precision: Precision, again: Again) -> list[int]:
    """Kept by every stage for reads, writes and the inputs of sublayers, beyond the Sources that it starts from.

    Args:
        residual: the strategy, whose parameters have values, on the CPU.
        stages: the sites of every stage.
        precision: bytes of a number.
        again: what is computed again instead of being kept.
    """
    one, two = (_kept(residual, stages, precision, again, tokens) for tokens in (1, 2))
    return [more - less for less, more in zip(one, two, strict=True)]


def _kept(residual: Residual, stages: Sequence[range], precision: Precision, again: Again, tokens: int) -> list[int]:
    """Bytes that every stage keeps for so many tokens, what does not grow with them included."""
    dtype = DTYPES[precision.source]
    residual = deepcopy(residual).to(DTYPES[precision.parameter])
    residual.depth_backend = "eager"  # it may be one for another device
    # the tensors too, so that no storage is used again
    known: dict[int, Tensor] = {_storage(parameter): parameter for parameter in residual.parameters()}
    kept, counts = 0, []

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        if _storage(tensor) not in known:
            known[_storage(tensor)] = tensor
            kept += tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=precision.compute == 2),
        saved_tensors_hooks(keep, _same),
    ):
        sources = residual.open(torch.ones(1, tokens, residual.dim, dtype=dtype, requires_grad=True) * 1)
        for stage in stages:
            if stage.start > 0:
                known |= {_storage(tensor): tensor for tensor in tensors_of(sources)}
            for site in stage:
                before, ahead = tensors_of(sources), sources.ahead
                with saved_tensors_hooks(_same, _same) if again is True else nullcontext():
                    h, note = residual.read(sources, site)
                    sources = residual.write(sources, h * 1, site, note)
                # the norm of the sublayer keeps its input; or the read waits for its second time, or the layer
                for tensor in {False: (h,), "read": (*before, *ahead), True: () if site % 2 else before}[again]:
                    keep(tensor)
            sources = Sources(sources.done, sources.partial)
            if stage.stop == residual.num_sites:
                residual.exit(sources)
            else:
                for tensor in tensors_of(sources):  # the pipeline holds what it sends
                    keep(tensor)
            counts.append(kept)
            kept = 0
    return counts


def width(depth: Depth, tensors: Any) -> int:
    """Numbers per token in these tensors of a run."""
    return sum(prod(depth.shapes[i]) for i in tensors)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(tensor: Tensor) -> Tensor:
    return tensor
