"""Every strategy once more, word for word from its paper: lists, stacks and sums, no seam, no state.

`h` is a sublayer input, `f(s, h)` the sublayer at site s. Parameters are taken from the strategy under test.
"""

from itertools import permutations

import torch

from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, HyperConnections, PreNorm


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
    """Eq. 2-4 and its ablations: weigh every source, for every head's slice of the width."""
    last = site == residual.num_sites

    def of_site(name):
        return getattr(residual, f"exit_{name}") if last else getattr(residual, name)[str(site)]

    def normed(v):
        return v if residual.eps is None else v / (v.square().mean(-1, keepdim=True) + residual.eps).sqrt()

    heads = residual.num_heads
    if residual.mixing == "static":
        logits = of_site("logits").view(heads, len(values))
        logits = [logits[:, s] for s in range(len(values))]  # (H,), whatever the token
    else:
        query = of_site("query")
        if residual.query_from == "input":
            query = torch.einsum("de,bte->btd", query, normed(values[-1])) / query.shape[1]
        gain = 1.0 if residual.eps is None else of_site("key_gain")
        logits = [(query * gain * normed(v)).unflatten(-1, (heads, -1)).sum(-1) for v in values]  # (B, T, H)
    if residual.mixing == "sigmoid":
        weights = [1 / (1 + (-logit).exp()) for logit in logits]
    else:
        total = sum(logit.exp() for logit in logits)
        weights = [logit.exp() / total for logit in logits]
    slices = [w[..., None] * v.unflatten(-1, (heads, -1)) for w, v in zip(weights, values, strict=True)]
    return sum(slices).flatten(-2)


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


def doubly_stochastic(residual, logits):
    """Sinkhorn (mHC), or a convex combination of all permutations (mHC-lite, arXiv 2601.05732)."""
    n = residual.num_streams
    if residual.mapping == "permutations":
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        matrices = [torch.eye(n, dtype=logits.dtype)[list(order)] for order in permutations(range(n))]
        return sum(weights[..., p, None, None] * matrix for p, matrix in enumerate(matrices))
    matrix = logits.unflatten(-1, (n, n)).exp()
    for _ in range(residual.num_iters):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def hyper_connections(residual, h, f):
    """Stream by stream; row i of A has what stream i gives to the read (column 0) and to stream j (column 1 + j)."""
    n = residual.num_streams
    streams = [h] * n
    for s in range(residual.num_sites):
        static, rows = residual.static[str(s)], []  # (n, n + 2): A and, in the last column, beta
        for i, stream in enumerate(streams):
            row = static[i].expand(*h.shape[:2], -1)
            if residual.dynamic:
                mean = stream.mean(-1, keepdim=True)
                normed = (stream - mean) / ((stream - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt()
                move = torch.tanh(torch.einsum("btd,dk->btk", normed, residual.projection[str(s)]))
                alpha, beta = residual.scale[str(s)]
                row = row + torch.cat([alpha * move[..., :-1], beta * move[..., -1:]], -1)
            rows.append(row)
        read = 0 if s == 0 else 1  # all streams are the embedding at site 0, which owns no column for its read
        h = sum(rows[i][..., :1] * streams[i] for i in range(n)) if read else streams[0]
        output = f(s, h)
        streams = [
            sum(rows[i][..., read + j, None] * streams[i] for i in range(n)) + rows[j][..., -1:] * output
            for j in range(n)
        ]
    return sum(streams)


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
        sizes = residual.parts[str(s)]
        parts = coefficients(residual.projection[str(s)], residual.bias[str(s)], residual.scale[str(s)], sizes)
        post = 2 * torch.sigmoid(parts[1] if s else parts[0])
        if s == 0:
            h, mixed = streams[..., 0, :], streams
        else:
            h = sum(torch.sigmoid(parts[0])[..., j, None] * streams[..., j, :] for j in range(n))
            matrix = doubly_stochastic(residual, parts[2]) if len(parts) > 2 else torch.eye(n, dtype=h.dtype)
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
    HyperConnections: hyper_connections,
    MHC: mhc,
}
