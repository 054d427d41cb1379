"""The ablations of depth attention (arXiv 2603.15031, Table 4): other logits, or another normaliser.

    logit_s = q . (key_gain * RMSNorm(source_s))      q = the learned query, or matrix RMSNorm(newest source) / D
    logit_s = a learned number                        input-independent mixing: neither queries nor keys
    weight_s = softmax_s(logit) or sigmoid(logit)     out = sum_s weight_s source_s

Plain formulas on any device: the fused kernels and the two phases know the softmax of static queries only.

Where the report is silent: an input-dependent query reads the newest source, which needs nothing more to cross a cut,
through the norm of the keys, without their gain. It is a mean over the D input channels, not a sum: Adam moves every
number by as much, and so moves these logits as fast as those of a learned query (with the sum, a model of width 48 lost
its way within 100 steps at a learning rate of 3e-3). Learned numbers go through the softmax, so that the weights sum to
one as those of depth attention; sigmoids do not compete, so their weights are not divided by their sum.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnres_lit.ops.backends import Backend
from attnres_lit.ops.depth_attention import depth_attention
from attnres_lit.ops.eager import compute_dtype, full_precision

Query = Literal["static", "input"]
Mixing = Literal["softmax", "sigmoid", "static"]
Logits = Callable[[Tensor, Tensor, Tensor | None, float | None, int], Tensor]


def depth_read(query: Query, mixing: Mixing, num_heads: int) -> Callable[..., Any]:
    """The function that reads from depth: `depth_attention`, or an ablation of it that is called the same way.

    Args:
        query: "static", learned per site, or "input", computed from the newest source.
        mixing: "softmax", "sigmoid", or "static", the softmax of learned numbers.
        num_heads: heads H, each with its own slice of D.

    Raises:
        ValueError: an unknown `query` or `mixing`; queries from the input where there are none.
    """
    if query not in get_args(Query) or mixing not in get_args(Mixing):
        raise ValueError(
            f"query is {' or '.join(get_args(Query))}, mixing is {', '.join(get_args(Mixing))}; "
            f"got query={query}, mixing={mixing}"
        )
    if (query, mixing) == ("static", "softmax"):
        return depth_attention
    if mixing == "static":
        if query == "input":
            raise ValueError("mixing=static has no queries: set query to static, or mixing to softmax or sigmoid")
        return partial(mix_depth, logits=learned_logits, heads=num_heads)
    logits = query_logits if query == "static" else input_logits
    return partial(mix_depth, logits=logits, sigmoid=mixing == "sigmoid", heads=num_heads)


def mix_depth(
    sources: Sequence[Tensor],
    parameter: Tensor,
    key_gain: Tensor | None = None,
    *,
    logits: Logits,
    sigmoid: bool = False,
    heads: int = 1,
    eps: float | None = 1e-6,
    rstd: Sequence[Tensor] = (),
    return_weights: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """One read. Saves references to the sources for backward, which computes everything again.

    Args:
        sources: S tensors `(..., D)`, the newest last.
        parameter: what `logits` takes.
        key_gain: `(D,)`, or None.
        logits: `query_logits`, `input_logits` or `learned_logits`.
        sigmoid: weigh by it instead of by a softmax over the sources.
        heads: H.
        eps: of the norm on keys; None leaves them un-normalised.
        rstd: as `depth_attention` has it; not used here.
        return_weights: also return the weights.
        backend: as `depth_attention` has it; not used here.

    Returns:
        `(..., D)` in the dtype of the sources. With `return_weights`, also `(S, ...)`, or `(S, ..., H)` with several
        heads, in at least fp32 and without gradient.
    """

    def formula(parameter: Tensor, key_gain: Tensor | None, *sources: Tensor) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(sources[0])
        with full_precision(sources[0]):
            values = torch.stack(sources).to(dtype)  # (S, ..., D)
            gain = None if key_gain is None else key_gain.to(dtype)
            scores = logits(values, parameter.to(dtype), gain, eps, heads)  # (S, ..., H)
            weights = scores.sigmoid() if sigmoid else scores.softmax(0)
            out = (weights.unsqueeze(-1) * values.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
        return out.to(sources[0].dtype), weights

    tensors = (parameter, key_gain, *sources)
    if return_weights:
        out, weights = formula(*tensors)
        return out, (weights if heads > 1 else weights.squeeze(-1)).detach()
    if torch.compiler.is_compiling():  # which decides by itself what to compute again
        return formula(*tensors)[0]
    return _Again.apply(formula, *tensors)


def query_logits(values: Tensor, query: Tensor, key_gain: Tensor | None, eps: float | None, heads: int) -> Tensor:
    """Those of a learned query of D numbers."""
    return _products(_normed(values, eps), query.view(heads, -1), key_gain)


def input_logits(values: Tensor, matrix: Tensor, key_gain: Tensor | None, eps: float | None, heads: int) -> Tensor:
    """Those of a query per token, a matrix of D rows times the newest source, over D."""
    keys = _normed(values, eps)
    query = keys[-1] @ matrix.reshape(-1, keys.shape[-1]).T / keys.shape[-1]  # (..., D)
    return _products(keys, query.unflatten(-1, (heads, -1)), key_gain)


def learned_logits(values: Tensor, numbers: Tensor, key_gain: Tensor | None, eps: float | None, heads: int) -> Tensor:
    """S numbers for each head, whatever the token."""
    by_source = numbers.view(heads, -1).T  # (S, H)
    axes = [1] * (values.dim() - 2)
    return by_source.view(len(values), *axes, heads).expand(*values.shape[:-1], heads)


def _normed(values: Tensor, eps: float | None) -> Tensor:
    return values if eps is None else values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()


def _products(keys: Tensor, query: Tensor, key_gain: Tensor | None) -> Tensor:
    """Keys `(S, ..., D)` and query `(..., H, D/H)` to `(S, ..., H)`."""
    keys = keys if key_gain is None else keys * key_gain
    return (keys.unflatten(-1, query.shape[-2:]) * query).sum(-1)


class _Again(torch.autograd.Function):
    """The first result of a formula, of which backward keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor | None) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        return formula(*tensors)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        needed = ctx.needs_input_grad[1:]
        inputs: list[Any] = [
            tensor if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.formula(*inputs)[0]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(grads) if need else None for need in needed)
