"""Costs against the report's numbers, and against models that were really built and run."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attnres_lit.model.norm
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.parallel.activations import (
    Precision,
    head_bytes,
    residual_bytes,
    sublayer_bytes,
)
from attnres_lit.parallel.cost_model import (
    Hardware,
    block_io,
    durations,
    flops,
    full_io,
    mhc_io,
    parameters,
    prefill_bytes,
    residual_io,
    standard_io,
)
from attnres_lit.parallel.depth import trace
from attnres_lit.parallel.partition import partition
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, HyperConnections, PreNorm
from residual.models import CONFIGS, factory_from_yaml

STRATEGIES = [PreNorm, DenseFormer, MHC, FullAttnRes, partial(BlockAttnRes, num_blocks=4)]


def test_table_1():
    """Per token and site, L 128, N 8, S 16, m 4."""
    dim = 7168
    assert standard_io(dim) == 3 * dim
    assert mhc_io(4, dim) == 34 * dim + 48
    assert full_io(16, 8, dim) == 24 * dim
    assert block_io(16, 8, dim) == 5.5 * dim


def test_residual_traffic_of_the_strategies():
    dim = 256
    assert residual_io(PreNorm(128, dim)) == 3 * dim
    assert residual_io(MHC(128, dim)) == 34 * dim + 48
    assert residual_io(BlockAttnRes(128, dim, num_blocks=8)) == 5.5 * dim
    assert residual_io(FullAttnRes(128, dim)) == (11 + 128 / 11) * dim  # runs of sqrt(128) sites
    # layer i averages i + 1 outputs
    assert residual_io(DenseFormer(8, dim)) == 3 * dim + sum(i + 2 for i in range(1, 5)) * dim / 8
    # reads of 1, 2, 3, 3... sources, keys and values apart
    assert residual_io(FullAttnRes(8, dim, window=2)) == (2 * (1 + 2 + 6 * 3) + 8) * dim / 8
    assert residual_io(FullAttnRes(4, dim, query="input")) == (2 * (1 + 2 + 3 + 4) + 4) * dim / 4
    assert residual_io(BlockAttnRes(4, dim, num_blocks=2, mixing="sigmoid")) == (2 * (1 + 2 + 2 + 3) + 4) * dim / 4
    assert residual_io(HyperConnections(8, dim)) == residual_io(MHC(8, dim))


def test_residual_traffic_of_a_strategy_of_ones_own():
    class Mine(PreNorm):
        pass

    assert residual_io(Mine(8, 16)) == 3 * 16

    class Other(BlockAttnRes.__base__):
        open, write = FullAttnRes.open, FullAttnRes.write
        window = 99

    assert residual_io(Other(4, 16)) == (1 + 2 + 3 + 4 + 4 * 2) * 16 / 4


def test_prefill():
    """Section 4.2: 15 GB, 1.9 GB on each of 8 devices, below 0.3 GB in chunks of 16K."""
    whole = prefill_bytes(8, 128 * 1024, 7168)
    assert whole == pytest.approx(15.03e9, rel=1e-3)
    assert prefill_bytes(8, 128 * 1024, 7168, shards=8) == whole // 8 == pytest.approx(1.88e9, rel=1e-3)
    assert prefill_bytes(8, 128 * 1024, 7168, shards=8, chunk=16 * 1024) == pytest.approx(0.235e9, rel=1e-3)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_built_model(path, tied):
    config = TransformerConfig(50, 32, 6, 4, num_kv_heads=2, hidden_dim=72, tie_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(config, factory_from_yaml(path))
    counts = parameters(model, 12)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.embedding == 50 * 32
    assert counts.head == 32 + (0 if tied else 50 * 32)
    depth = trace(factory_from_yaml(path)(12, 32))
    for stages in (1, 2, 5):
        cut = partition(config, depth.cuts, stages, 8)
        shared = sum(counts.of_stage(stage, depth.uses) for stage in cut) - counts.total
        assert shared == 0  # every parameter belongs to one stage


@pytest.mark.parametrize(("kv_heads", "hidden_dim"), [(None, None), (1, None), (None, [8, 200, 24])])
def test_flops_of_a_built_model(kv_heads, hidden_dim):
    config = TransformerConfig(50, 32, 3, 4, num_kv_heads=kv_heads, hidden_dim=hidden_dim, max_seq_len=24)
    model = Transformer(config, PreNorm)
    tokens = torch.randint(50, (2, 24))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(tokens).sum()
        forward = counter.get_total_flops()
        loss.backward()
    # that kernel multiplies with the masked half of the scores as well: T keys a token, not (T + 1) / 2
    masked = 3 * 2 * 32 * (24 - 1)
    found = flops(config, 24, False)
    assert forward / tokens.numel() == found.forward + masked
    assert counter.get_total_flops() / tokens.numel() == found.training + 3 * masked
    assert found.recomputed == flops(config, 24, "read").recomputed == 0
    assert flops(config, 24, True).recomputed == found.forward - 2 * 32 * 50


class FusedNorm(torch.autograd.Function):
    """What a fused RMSNorm keeps, as on a GPU: its input, the gain and the reciprocal RMS."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, gain, rstd)
        return (x * rstd).to(x.dtype) * gain

    @staticmethod
    def backward(ctx, gradient):
        x, gain, rstd = ctx.saved_tensors
        return gradient * gain * rstd, (gradient * x * rstd).sum((0, 1)), None  # as large as the real ones


@pytest.fixture
def fused_norm(monkeypatch):
    class Functional:
        @staticmethod
        def rms_norm(x, shape, gain, eps):
            return FusedNorm.apply(x, gain, eps)

    monkeypatch.setattr(attnres_lit.model.norm, "F", Functional)


@pytest.mark.parametrize("again", [False, "read", True])
@pytest.mark.parametrize("residual", STRATEGIES)
def test_activations_as_measured(fused_norm, monkeypatch, residual, again):
    """Bytes held between forward and backward, as the profiler counts them, within 1%; of layers of unequal width."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from interleaved import memory

    config = TransformerConfig(100, 96, 6, 4, 2, hidden_dim=[32, 256, 512, 32, 256, 32], max_seq_len=128)
    model = Transformer(config, residual, checkpoint_activations=again, depth_backend="eager")
    tokens = torch.randint(100, (4, 128))
    held = memory(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))[0] / tokens.numel()
    assert held == pytest.approx(kept(model, Precision.of(32), again) - 8, rel=0.01)  # the tokens were there before


@pytest.mark.parametrize("fp32_residual", [False, True])
@pytest.mark.parametrize("residual", STRATEGIES)
def test_activations_in_mixed_precision(fused_norm, residual, fp32_residual):
    """Tensors that autograd saves, each storage once, copies of weights aside, within 1%."""
    config = TransformerConfig(100, 96, 6, 4, num_kv_heads=2, max_seq_len=64)
    model = Transformer(config, residual, fp32_residual=fp32_residual)
    tokens = torch.randint(100, (2, 64))
    known = {each.untyped_storage()._cdata: each for each in (*model.parameters(), *model.buffers())}
    weights = {module.weight.shape for module in model.modules() if isinstance(module, nn.Linear)}
    weights |= {shape[::-1] for shape in weights}
    saved = 0

    def keep(tensor):
        nonlocal saved
        key = tensor.untyped_storage()._cdata
        if key not in known:
            known[key] = tensor
            if tensor.shape not in weights:
                saved += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    assert saved / tokens.numel() == pytest.approx(kept(model, Precision.of("bf16-mixed", fp32_residual)), rel=0.01)


def kept(model, precision, again=False):
    """Bytes per token of the whole model, as a single stage."""
    stages = [range(model.config.num_sites)]
    fixed = head_bytes(model.config, precision) + 8
    sublayers = 0 if again is True else sum(sublayer_bytes(model.config, precision))
    return fixed + sublayers + residual_bytes(model.residual, stages, precision, again)[0]


@pytest.mark.parametrize("residual", STRATEGIES)
def test_stages_keep_together_what_the_model_keeps(residual):
    """But for reciprocal RMS, which do not cross; recomputed layers also keep a tensor where one is cut in two."""
    made, precision, stages = residual(12, 16), Precision.of("32-true"), [range(4), range(4, 7), range(7, 12)]
    depth = trace(made)
    new_inside_a_layer = set(depth.cuts[7].tensors) - set(depth.cuts[6].tensors)
    for again, cut in ((False, 0), ("read", 0), (True, 4 * sum(depth.shapes[i].numel() for i in new_inside_a_layer))):
        whole = residual_bytes(made, [range(12)], precision, again)[0]
        assert whole <= sum(residual_bytes(made, stages, precision, again)) <= whole * 1.04 + cut


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("32-true", (4, 4, 4)),
        (32, (4, 4, 4)),
        ("bf16-mixed", (4, 2, 2)),
        ("16", (4, 2, 2)),
        ("bf16-true", (2, 2, 2)),
        ("64-true", (8, 8, 8)),
    ],
)
def test_precisions(name, sizes):
    assert Precision.of(name) == Precision(*sizes)
    wide = Precision.of(name, fp32_residual=True)
    assert wide.source == (4 if sizes == (4, 2, 2) else sizes[2])


def test_refuses_a_precision():
    with pytest.raises(ValueError, match="unknown precision fp8: bf16-mixed"):
        Precision.of("fp8")


def test_refuses_hardware():
    with pytest.raises(ValueError, match="link_bandwidth=0 must be above 0"):
        Hardware(link_bandwidth=0)
    with pytest.raises(ValueError, match="link_latency=-1 must be at least 0"):
        Hardware(link_latency=-1)


def test_durations_add_up():
    config = TransformerConfig(50, 32, 3, 4)
    stages = [range(2), range(2, 6)]
    hardware = Hardware(device_flops=1.0, memory_bandwidth=1.0)
    plain = durations(config, stages, 100.0, 16, 8, False, hardware)
    cost = flops(config, 8, True)
    assert sum(each["F"] for each in plain) == pytest.approx(16 * (cost.forward + 600))
    assert sum(each["B"] for each in plain) == pytest.approx(2 * 16 * (cost.forward + 600))
    for each in plain:
        assert each["B"] == pytest.approx(each["I"] + each["W"])
    again = durations(config, stages, 100.0, 16, 8, True, hardware)
    extra = sum(a["B"] - b["B"] for a, b in zip(again, plain, strict=True))
    assert extra == pytest.approx(16 * (cost.recomputed + 600))
    read = durations(config, stages, 100.0, 16, 8, "read", hardware)
    assert sum(a["B"] - b["B"] for a, b in zip(read, plain, strict=True)) == pytest.approx(16 * 600)
