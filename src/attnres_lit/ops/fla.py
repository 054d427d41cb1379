"""fla-core's fused Triton kernels as torch operators: the backend "fla".

Its autograd Function would break a compiled graph; an operator with a fake and a backward does not. Written against
`fla.ops.attnres.fused` of fla-core 0.6.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_lit.ops.backends import notice


def fits(sources: Sequence[Tensor], query: Tensor, eps: float | None) -> bool:
    """Whether the kernels take this call: one head, normalised keys, at most fp32, aligned sources. Says why not."""
    reasons = {
        "several heads": query.dim() == 2,
        "keys without a norm": eps is None,
        str(sources[0].dtype): sources[0].dtype == torch.float64,
        "a source that is not 16-byte aligned": any(
            source.storage_offset() * source.element_size() % 16 for source in sources
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            notice(f"depth attention runs eager: fla's kernels do not take {reason}")
    return not any(reasons.values())


def depth_attention(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float | None, return_weights: bool
) -> Any:
    """As `ops.depth_attention`, for what `fits`."""
    assert eps is not None
    wide = query.to(torch.float32)
    gain = torch.ones_like(wide) if key_gain is None else key_gain.to(torch.float32)
    out, _rstd, logit, lse = torch.ops.attnres_lit.fla_forward(list(sources), wide, gain, eps)
    return (out, (logit - lse).exp()) if return_weights else out


@torch.library.custom_op("attnres_lit::fla_forward", mutates_args=())
def _forward(
    sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fla.ops.attnres import fused  # pyrefly: ignore[missing-import]

    flat = [source.contiguous() for source in sources]
    table = fused._build_ptr_table(flat)
    out, _, rstd, logit, lse = fused.fused_attnres_fwd(query, flat, table, gain, None, eps, 1.0, 1)
    return out, rstd, logit, lse


@_forward.register_fake
def _(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first = sources[0]
    rstd = first.new_empty((len(sources), *first.shape[:-1]), dtype=torch.float32)
    return torch.empty_like(first), rstd, torch.empty_like(rstd), torch.empty_like(rstd[0])


@torch.library.custom_op("attnres_lit::fla_backward", mutates_args=())
def _backward(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, gain: Tensor, rstd: Tensor, logit: Tensor, lse: Tensor,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    from fla.ops.attnres import fused  # pyrefly: ignore[missing-import]

    flat = [source.contiguous() for source in sources]
    table = fused._build_ptr_table(flat)
    grads, grad_query, grad_gain, _ = fused.fused_attnres_bwd(
        grad.contiguous(), query, flat, table, gain, None, None, rstd, logit, lse, eps, 1.0, 1
    )
    return [*grads, grad_query, grad_gain]


@_backward.register_fake
def _(
    grad: Tensor, sources: Sequence[Tensor], query: Tensor, gain: Tensor, rstd: Tensor, logit: Tensor, lse: Tensor,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor in (*sources, query, gain)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query, gain, ctx.eps = inputs
    ctx.save_for_backward(query, gain, *output[1:], *sources)
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx: Any, grad: Tensor, *_: Any) -> Any:
    query, gain, rstd, logit, lse, *sources = ctx.saved_tensors
    grads = torch.ops.attnres_lit.fla_backward(grad, sources, query, gain, rstd, logit, lse, ctx.eps)
    return grads[: len(sources)], *grads[len(sources) :], None


_forward.register_autograd(_autograd, setup_context=_setup)
