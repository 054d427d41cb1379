"""Every strategy once more, word for word from its paper: lists, stacks and sums, no seam, no state.

`h` is a sublayer input, `f(s, h)` the sublayer at site s. Parameters are taken from the strategy under test.
"""

import torch

from attnres_lit.ops import depth_attention_reference
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm


def reference_logits(model, tokens):
    """`Transformer.forward` with the depth part replaced by the reference loop of its strategy."""

    def f(site, h):
        return model.sublayers[str(site)](h)

    h = REFERENCES[type(model.residual)](model.residual, model.embedding(tokens), f)
    return model.head(model.norm(h))


def prenorm(residual, h, f):
    for s in range(residual.num_sites):
        h = h + f(s, h)
    return h


def denseformer(residual, h, f):
    xs, y = [h], h
    dilation = residual.dilation
    for i in range(1, residual.num_sites // 2 + 1):
        x = y + f(2 * i - 2, y)
        x = x + f(2 * i - 1, x)
        xs.append(x)
        y = x
        if i % residual.period == 0:
            alpha = residual.alpha[str(2 * i - 1)]
            terms = [xs[j] for j in range(i + 1) if j % dilation == i % dilation]
            assert len(terms) == len(alpha) == i // dilation + 1
            y = sum(a * x for a, x in zip(alpha, terms, strict=True))
    return y


def attend(residual, values, site):
    key = "exit" if site == residual.num_sites else str(site)
    query = residual.exit_query if key == "exit" else residual.query[key]
    gain = None
    if residual.eps is not None:
        gain = residual.exit_key_gain if key == "exit" else residual.key_gain[key]
    if residual.num_heads > 1:
        query = query.view(residual.num_heads, -1)
    return depth_attention_reference(values, query, gain, eps=residual.eps)


def full_attnres(residual, h, f):
    values = [h]  # v_0 = embedding, v_i = f_{i-1}
    for s in range(residual.num_sites + 1):
        seen = [values[0], *values[1:][-residual.window :]]
        h = values[0] if s == 0 else attend(residual, seen, s)
        if s < residual.num_sites:
            values.append(f(s, h))
    return h


def block_attnres(residual, h, f):
    """Eq. 6 per block: V = [b_0 .. b_{n-1}] at its first site, [b_0 .. b_{n-1}, b_n^{i-1}] after it."""
    finished = [h]
    ends = [*residual.starts[1:], residual.num_sites]
    for start, end in zip(residual.starts, ends, strict=True):
        outputs = []
        for s in range(start, end):
            values = [*finished, sum(outputs)] if outputs else finished
            h = finished[0] if s == 0 else attend(residual, values, s)
            outputs.append(f(s, h))
        finished.append(sum(outputs))
    return attend(residual, finished, residual.num_sites)


def mhc(residual, h, f):
    """One token at a time in the equations; here with the token axes in front."""
    n = residual.num_streams
    streams = torch.stack([h] * n, -2)  # (B, T, n, D)

    def coefficients(projection, bias, scale, sizes):
        flat = streams.flatten(-2)
        normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
        out, row = [], 0
        for part, size in enumerate(sizes):
            rows = slice(row, row + size)
            out.append(scale[part] * torch.einsum("btk,rk->btr", normed, projection[rows]) + bias[rows])
            row += size
        return out

    for s in range(residual.num_sites):
        sizes = [n, n, n * n] if s else [n]
        parts = coefficients(residual.projection[str(s)], residual.bias[str(s)], residual.scale[str(s)], sizes)
        post = 2 * torch.sigmoid(parts[1] if s else parts[0])
        if s == 0:
            h, mixed = streams[..., 0, :], streams
        else:
            h = sum(torch.sigmoid(parts[0])[..., j, None] * streams[..., j, :] for j in range(n))
            matrix = parts[2].unflatten(-1, (n, n)).exp()
            for _ in range(residual.num_iters):
                matrix = matrix / matrix.sum(-2, keepdim=True)
                matrix = matrix / matrix.sum(-1, keepdim=True)
            mixed = torch.stack(
                [sum(matrix[..., k, j, None] * streams[..., j, :] for j in range(n)) for k in range(n)], -2
            )
        output = f(s, h)
        streams = mixed + torch.stack([post[..., k, None] * output for k in range(n)], -2)
    if not residual.learned_exit:
        return streams.mean(-2)
    (gate,) = coefficients(residual.exit_projection, residual.exit_bias, residual.exit_scale, [n])
    return sum(torch.sigmoid(gate)[..., j, None] * streams[..., j, :] for j in range(n))


REFERENCES = {
    PreNorm: prenorm,
    DenseFormer: denseformer,
    FullAttnRes: full_attnres,
    BlockAttnRes: block_attnres,
    MHC: mhc,
}
