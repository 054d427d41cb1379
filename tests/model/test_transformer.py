"""The Llama-style decoder itself: what attention sees, initial values, sizes that do not fit."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.model.attention import Rotary
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm


def build(residual=PreNorm, **config):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**({"vocab_size": 31, "dim": 32, "num_layers": 3} | config)), residual)


def test_defaults_make_a_small_valid_model():
    config = TransformerConfig(vocab_size=256)
    logits = Transformer(config, BlockAttnRes)(torch.zeros(2, 5, dtype=torch.long))
    assert logits.shape == (2, 5, 256)
    assert logits.dtype == torch.float32


def test_equals_a_plain_llama_loop():
    """The model under PreNorm against the textbook: projections, rotation, softmax, SwiGLU, all by hand."""
    model = build(num_heads=4, num_kv_heads=2, norm_eps=1e-6).double()
    tokens = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))

    def norm(x, gain):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

    def rotate(x):  # (B, T, heads, 8): channels i and i + 4 are a complex number, turned by t * theta_i
        z = torch.complex(x[..., :4], x[..., 4:])
        theta = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        angle = torch.arange(7, dtype=torch.float64)[:, None] * theta
        z = z * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((z.real, z.imag), -1)

    h = model.embedding(tokens)
    for site, sublayer in enumerate(model.sublayers.values()):
        x, m = norm(h, sublayer.norm.weight), sublayer.mixer
        if site % 2:
            h = h + (F.silu(x @ m.gate_proj.weight.T) * (x @ m.up_proj.weight.T)) @ m.down_proj.weight.T
            continue
        q = rotate((x @ m.q_proj.weight.T).view(2, 7, 4, 8))
        k = rotate((x @ m.k_proj.weight.T).view(2, 7, 2, 8)).repeat_interleave(2, 2)
        v = (x @ m.v_proj.weight.T).view(2, 7, 2, 8).repeat_interleave(2, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(2, 7, 32)
        h = h + out @ m.o_proj.weight.T
    expected = norm(h, model.norm.weight) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-6)  # the rotary tables are fp32


def test_rotary_keeps_lengths_and_depends_on_distance_only():
    rotary = Rotary(TransformerConfig(vocab_size=2, dim=8, num_heads=1, max_seq_len=32))
    q, k = torch.randn(8), torch.randn(8)
    rows = torch.stack([rotary(t.expand(1, 1, 32, 8), slice(32))[0, 0] for t in (q, k)])  # (2, 32, 8)
    torch.testing.assert_close(rows.norm(dim=-1), torch.stack([q.norm(), k.norm()])[:, None].expand(2, 32))
    scores = rows[0] @ rows[1].T
    torch.testing.assert_close(scores[5, 3], scores[25, 23], rtol=0, atol=1e-5)
    assert (scores[5, 3] - scores[5, 4]).abs() > 1e-3


@pytest.mark.parametrize("residual", [PreNorm, DenseFormer, MHC, FullAttnRes, BlockAttnRes])
def test_initial_values_follow_the_table_and_are_the_same_for_every_strategy(residual):
    model, plain = build(residual, dim=64, num_layers=8), build(dim=64, num_layers=8)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            is_output = "o_proj" in name or "down_proj" in name
            expected = {"embedding.weight": 1, "head.weight": 0.02}.get(name, parameter.shape[1] ** -0.5)
            expected = expected / 4 if is_output else expected
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_tied_embeddings_share_one_matrix():
    model = build(tie_embeddings=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert build().head.weight is not build().embedding.weight


def test_hidden_dim_is_eight_thirds_rounded_up():
    sizes = {dim: build(dim=dim, num_heads=2).sublayers["1"].mixer.up_proj.out_features for dim in (32, 96)}
    assert sizes == {32: 88, 96: 256}
    assert build(hidden_dim=50).sublayers["1"].mixer.up_proj.out_features == 50


def test_an_mlp_width_per_layer():
    """Each layer's MLP has its own, and the same initial values as in a model in which all are as wide."""
    widths = [8, 400, 24]
    model = build(hidden_dim=widths)
    for layer, width in enumerate(widths):
        mlp, all_as_wide = (each.sublayers[str(2 * layer + 1)].mixer for each in (model, build(hidden_dim=width)))
        assert mlp.up_proj.weight.shape == mlp.gate_proj.weight.shape == (width, 32)
        assert mlp.down_proj.weight.shape == (32, width)
        for name, weight in mlp.named_parameters():
            assert torch.equal(weight, all_as_wide.get_parameter(name)), name
    wide = model.sublayers["3"].mixer.down_proj.weight
    assert wide.std().item() == pytest.approx(400**-0.5 / 6**0.5, rel=0.05)
    assert build(hidden_dim=[50] * 3).config.mlp_dims == build(hidden_dim=50).config.mlp_dims


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"num_heads": 5}, "dim=32 must be an even multiple of num_heads=5"),
        ({"num_heads": 32}, "even multiple of num_heads=32"),
        ({"rope_theta": 0}, "rope_theta=0 must be above 0"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 at least 0"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"hidden_dim": 0}, "hidden_dim=0 must be a whole number of at least 1"),
        ({"hidden_dim": True}, "hidden_dim=True must be a whole number"),
        ({"hidden_dim": [8, 8]}, r"hidden_dim=\[8, 8\] has 2 widths: give one for each of num_layers=3"),
        ({"hidden_dim": []}, r"hidden_dim=\[\] has 0 widths"),
        ({"hidden_dim": [8, 0, 8]}, r"hidden_dim=\[8, 0, 8\] must be a whole number of at least 1, or a list of them"),
        ({"hidden_dim": [8, True, 8]}, r"hidden_dim=\[8, True, 8\] must be a whole number"),
        ({"hidden_dim": [8, None, 8]}, r"hidden_dim=\[8, None, 8\] must be a whole number"),
    ],
)
def test_sizes_that_do_not_fit(config, message):
    with pytest.raises(ValueError, match=message):
        build(**config)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="9 tokens exceed max_seq_len=8"):
        build(max_seq_len=8)(torch.zeros(1, 9, dtype=torch.long))
