"""Depth attention: a softmax over the sources at one token position (arXiv 2603.15031, Eq. 2-4).

    logit_s = query . (key_gain * RMSNorm(source_s))      weights = softmax_s(logit)      out = sum_s weights_s source_s

There is no 1/sqrt(D), no temperature and no bias; keys are normalised, values are the raw sources. `H` heads split D
after the norm: each slice of D has its own softmax.

Shapes: S sources, D width, H heads, `...` any leading axes (batch, tokens).
"""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from attnres_lit.ops import eager, fla
from attnres_lit.ops.attend import attend
from attnres_lit.ops.backends import Backend, engine, inference_kernel, resolve
from attnres_lit.ops.eager import compute_dtype, full_precision

FEW = 2**15  # elements of all sources together: so few are stacked, since calls cost more than copies


def depth_attention_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The formula, word for word: stack, normalise, softmax, sum. `depth_attention` is compared with this.

    Arguments, result and errors are those of `depth_attention`; here the weights carry a gradient too.
    """
    check_sources(sources, query, key_gain)
    heads = query.shape[0] if query.dim() == 2 else 1
    dtype = compute_dtype(sources[0])
    values = torch.stack(tuple(sources)).to(dtype)  # (S, ..., D)
    keys = values
    if eps is not None:
        keys = keys * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    if key_gain is not None:
        keys = keys * key_gain.to(dtype)
    keys, by_head = keys.unflatten(-1, (heads, -1)), values.unflatten(-1, (heads, -1))  # (S, ..., H, D/H)
    weights = (keys * query.to(dtype).view(heads, -1)).sum(-1).softmax(0)  # (S, ..., H)
    out = (weights.unsqueeze(-1) * by_head).sum(0).flatten(-2).to(sources[0].dtype)
    if not return_weights:
        return out
    return out, (weights if query.dim() == 2 else weights.squeeze(-1))


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    rstd: Sequence[Tensor] = (),
    return_weights: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    rstd: Sequence[Tensor] = (),
    return_weights: Literal[True],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    rstd: Sequence[Tensor] = (),
    return_weights: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over depth without stacking or copying the sources.

    Backward needs references to the sources, their reciprocal RMS and one scalar per token, source and head; the rest
    is computed again.

    Args:
        sources: S tensors `(..., D)` of one dtype and device. Strided and aliased ones are fine.
        query: the pseudo-query `(D,)`, or `(H, D / H)` for H heads.
        key_gain: the gain `(D,)` of the RMSNorm on keys; None means ones.
        eps: added to the mean square in that norm; None leaves the keys un-normalised.
        rstd: what `reciprocal_rms` returned for the first of the sources, so that it is not computed again.
        return_weights: also return the softmax weights.
        backend: see `ops/backends.py`.

    Returns:
        `(..., D)` in the dtype of the sources. With `return_weights`, also `(S, ...)`, or `(S, ..., H)` for a query
        with heads, in at least fp32 and without gradient.

    Raises:
        ValueError: no sources; sources that differ in shape, dtype or device; a query or gain of another width; a
            backend that is unknown, not installed, or for another device.
    """
    check_sources(sources, query, key_gain)
    if not return_weights and (alone := read_alone(sources, query, key_gain, eps, backend)) is not None:
        return alone
    backend = resolve(backend, sources, query.shape[0] if query.dim() == 2 else 1)
    if len(sources) == 1 and not return_weights:  # the softmax of one logit is 1, whatever the query
        return sources[0]
    if backend == "fla" and fla.fits(sources, query, eps):
        return fla.depth_attention(sources, query, key_gain, eps, return_weights)
    rstd = complete_rstd(sources, rstd, eps, backend)
    read = attend(engine(backend), sources, rstd, fold([query], [key_gain]), dtype=sources[0].dtype)
    if not return_weights:
        return read.outs[0]
    logits = read.dots[:, 0] * torch.stack(rstd).view(len(rstd), -1, 1) if rstd else read.dots[:, 0]  # (S, M, H)
    weights = (logits - read.top[0]).exp() / read.denom[0].detach()
    return read.outs[0], weights.view(len(sources), *sources[0].shape[:-1], *query.shape[:-1])


def reciprocal_rms(source: Tensor, eps: float, backend: Backend = "auto") -> Tensor:
    """`1 / sqrt(mean(source^2) + eps)`, which every reader of a finished source can share.

    A constant to autograd: what is given it as `rstd` differentiates through the norm itself.

    Args:
        source: `(..., D)`.
        eps: of the norm on keys.
        backend: see `ops/backends.py`.

    Returns:
        `(...)`, in at least fp32.
    """
    with torch.no_grad(), full_precision(source):
        return engine(resolve(backend, [source])).reciprocal_rms(source, eps)


def complete_rstd(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], eps: float | None, backend: Backend
) -> tuple[Tensor, ...]:
    """The reciprocal RMS of all sources, given that of the first ones; nothing where keys are not normalised."""
    if eps is None:
        return ()
    return *rstd, *(reciprocal_rms(source, eps, backend) for source in sources[len(rstd) :])


def _stacked(sources: Sequence[Tensor], query: Tensor, eps: float | None) -> Tensor:
    """The formula in the fewest calls, on a copy of the sources."""
    values = torch.stack(tuple(sources)).to(compute_dtype(sources[0]))  # (S, ..., D)
    with full_precision(values):
        logits = values @ query.to(values.dtype)
    if eps is not None:
        logits = logits * eager.reciprocal_rms(values, eps)
    return (logits.softmax(0).unsqueeze(-1) * values).sum(0).to(sources[0].dtype)


def read_alone(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float | None, backend: Backend
) -> Tensor | None:
    """In inference: the read in one call, which takes nothing from other reads and leaves nothing for a backward.

    Args:
        sources: of one shape, dtype and device.
        query, key_gain, eps, backend: as in `depth_attention`.

    Returns:
        `(..., D)`, or None where there is no such call, and `depth_attention` reads otherwise.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or query.dim() > 1 or not sources:
        return None
    if backend in ("auto", "compiled") and (kernel := inference_kernel()) is not None:
        out = kernel.read(sources, query, key_gain, eps)
        if out is not None:
            return out
    if backend == "auto" and len(sources) > 1 and sources[0].numel() * len(sources) <= FEW:
        return _stacked(sources, query if key_gain is None else query * key_gain, eps)
    return None


def fold(queries: Sequence[Tensor], key_gains: Sequence[Tensor | None]) -> Tensor:
    """Q queries `(D,)` or `(H, D/H)` and their gains to what the raw products need: `(Q, H, D/H)`, wide."""
    folded = [
        query if gain is None else query * gain.view_as(query) for query, gain in zip(queries, key_gains, strict=True)
    ]
    stacked = torch.stack(folded)
    return (stacked if stacked.dim() == 3 else stacked.unsqueeze(1)).to(compute_dtype(stacked))


def check_sources(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None) -> None:
    """Raise a ValueError that says what was given where the arguments of a depth read do not fit together."""
    if len(sources) == 0:
        raise ValueError("depth attention needs at least one source, got none")
    first, count = sources[0], len(sources)
    # lists compare faster than tensors one by one, which counts when a token is decoded
    if (
        [source.shape for source in sources] != [first.shape] * count
        or [source.dtype for source in sources] != [first.dtype] * count
        or [source.device for source in sources] != [first.device] * count
    ):
        _refuse(sources)
    width = first.shape[-1]
    if query.dim() not in (1, 2) or query.numel() != width:
        raise ValueError(f"query must be (D,) or (H, D / H) with D = {width}, got {tuple(query.shape)}")
    if key_gain is not None and key_gain.shape != (width,):
        raise ValueError(f"key_gain must be ({width},), got {tuple(key_gain.shape)}")


def _refuse(sources: Sequence[Tensor]) -> None:
    """Name the first source that differs."""
    first = sources[0]
    for k, source in enumerate(sources):
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"sources must agree: source 0 is {tuple(first.shape)} {first.dtype} on {first.device}, "
                f"source {k} is {tuple(source.shape)} {source.dtype} on {source.device}"
            )
