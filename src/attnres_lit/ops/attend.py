"""Depth attention as one autograd Function over either engine: one-shot, phase 1 and phase 2 are calls of it.

Saved for backward: references to the sources, their reciprocal RMS (shared by all readers of a source), and one wide
scalar per token, source and query. Everything else is computed again.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnres_lit.ops.eager import full_precision


class Attended(NamedTuple):
    """What `attend` returns for Q queries; shapes as in `eager.forward`."""

    outs: tuple[Tensor, ...]  # Q of (..., D)
    top: Tensor  # (Q, M, H), without gradient: the result does not depend on it
    denom: Tensor  # (Q, M, H)
    dots: Tensor  # (S, Q, M, H), without gradient


def attend(
    engine: ModuleType,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    queries: Tensor,
    carry: Sequence[Tensor] = (),
    dtype: torch.dtype | None = None,
) -> Attended:
    """`engine.forward`, differentiable in sources, queries and carry; `rstd` counts as a function of the sources."""
    *outs, top, denom, dots = _Attend.apply(engine, dtype, len(sources), len(rstd), queries, *sources, *rstd, *carry)
    return Attended(tuple(outs), top, denom, dots)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: ModuleType, dtype: torch.dtype | None, S: int, R: int, queries: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        sources, rstd, carry = tensors[:S], tensors[S : S + R], tensors[S + R :]
        with full_precision(queries):
            outs, top, denom, dots = engine.forward(sources, rstd, queries, carry, dtype)
        ctx.engine, ctx.normalised, ctx.sizes = engine, dtype is not None, (S, R)
        # a merge keeps its own result, which the next norm keeps anyway, in place of the wide sum it started from
        merged = (outs[0], carry[1]) if carry else ()
        ctx.save_for_backward(queries, top, denom, dots, *sources, *rstd, *merged)
        ctx.mark_non_differentiable(top, dots)
        ctx.set_materialize_grads(False)
        return *outs, top, denom, dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        queries, top, denom, dots, *tensors = ctx.saved_tensors
        S, R = ctx.sizes
        sources, rstd, merged = tensors[:S], tensors[S : S + R], tensors[S + R :]
        *grad_outs, _, grad_denom, _ = grads
        like = (*merged, *sources)[0]
        grad_outs = [torch.zeros_like(like, dtype=queries.dtype) if grad is None else grad for grad in grad_outs]
        if ctx.normalised:
            grad_denom = None  # a traced graph makes it zeros
        elif grad_denom is None:
            grad_denom = torch.zeros_like(denom)
        with full_precision(queries):
            grad_queries, grad_sources, grad_carry = ctx.engine.backward(
                sources, rstd, queries, top, denom, dots, grad_outs, grad_denom, merged, ctx.needs_input_grad[5 : 5 + S]
            )
        if merged:
            grad_carry = (grad_carry[0], None, grad_carry[1])
        return None, None, None, None, grad_queries, *grad_sources, *[None] * R, *grad_carry
