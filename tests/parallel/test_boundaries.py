"""What really crosses the boundaries of a pipeline: the bytes that `plan` predicts, for any strategy."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn

from attnres_lit.parallel import PipelineStrategy
from attnres_lit.parallel.cost_model import Hardware
from attnres_lit.parallel.plan import plan
from attnres_lit.parallel.settings import PipelineSettings
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm, Residual, Sources
from parallel.runs import Shares, whole
from parallel.world import on_ranks
from training.tiny import BATCH, TOKENS, tiny_config, tiny_module, tiny_trainer

MICROBATCHES, LAYERS = 4, 8


class Odd(Residual):
    """As unlike the others as can be: a parameter of all sites, a wider source, a partial that is done as well."""

    def __init__(self, num_sites, dim):
        super().__init__(num_sites, dim)
        self.scale = nn.Parameter(torch.empty(dim))
        self.mix = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(num_sites))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.scale, 0.9)
        for each in self.mix:
            nn.init.constant_(each.weight, 1.1)

    def open(self, embedding):
        pair = torch.stack([embedding, embedding * self.scale], 2)  # (B, T, 2, D)
        return Sources((pair, embedding), embedding)

    def read(self, sources, site):
        return sources.stream + 0.1 * sources.done[0].mean(2), ()

    def write(self, sources, output, site, note):
        stream = sources.stream + self.mix[site](output.unsqueeze(-1)).squeeze(-1) * self.scale
        return Sources((sources.done[0], stream), stream)

    def exit(self, sources):
        return sources.stream * self.scale


class Sent(Callback):
    """What this rank sent in a batch, and the most that its cache held."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.sent = dict(trainer.strategy.pipeline.sent)
        self.peak = trainer.strategy.cache.peak_bytes


def train(folder, residual, options):
    sent, size = Sent(), dist.get_world_size() if options else 1
    strategy = PipelineStrategy(num_microbatches=MICROBATCHES, **options) if options else "auto"
    trainer = tiny_trainer(
        folder,
        strategy=strategy,
        devices=size,
        max_steps=3,
        accumulate_grad_batches=1 if options else MICROBATCHES,
        use_distributed_sampler=False,
        callbacks=[sent] if options else [],
    )
    module = tiny_module(residual, config=tiny_config(num_layers=LAYERS))
    batches, batch_size = (3, BATCH * MICROBATCHES) if options else (3 * MICROBATCHES, BATCH)
    trainer.fit(module, Shares(batches, batch_size))
    parameters = {name: whole(parameter) for name, parameter in module.model.named_parameters()}
    return (sent.sent, sent.peak, parameters) if options else parameters


STRATEGIES = {
    "prenorm": PreNorm,
    "denseformer": DenseFormer,
    "mhc": MHC,
    "full": FullAttnRes,
    "full_window": partial(FullAttnRes, window=3),
    "block": partial(BlockAttnRes, block_size=3),
    "block_shared": partial(BlockAttnRes, block_size=5, two_phase=True),
}
LAYOUTS = {(2, 1): "1F1B", (2, 2): "Interleaved1F1B", (2, 4): "LoopedBFS", (4, 2): "InterleavedZeroBubble"}
FAST = {("block", 2, 2), ("full", 2, 4), ("block_shared", 2, 1), ("mhc", 2, 1)}


def predicted(residual, ranks, virtual_stages, schedule, cached):
    model = tiny_module(residual, config=tiny_config(num_layers=LAYERS)).model
    settings = PipelineSettings(ranks, MICROBATCHES, schedule, virtual_stages)
    hardware = Hardware(1e9, 1e9, 1e9, 0.0)
    numbers = plan(model, settings, hardware, BATCH * MICROBATCHES, TOKENS, "32-true").numbers
    return [each["exact" if cached else "naive"] for each in numbers["boundaries"]["list"]]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("name", "ranks", "virtual_stages"),
    [
        pytest.param(name, *layout, marks=() if (name, *layout) in FAST else pytest.mark.slow)
        for name in STRATEGIES
        for layout in LAYOUTS
    ],
)
def test_bytes_are_those_of_plan(name, ranks, virtual_stages, cached, tmp_path):
    schedule = LAYOUTS[ranks, virtual_stages]
    options = {"schedule": schedule, "virtual_stages": virtual_stages, "cache_blocks": "auto" if cached else False}
    results = on_ranks(ranks, train, tmp_path, STRATEGIES[name], options)
    sent = {edge: size for each, *_ in results for edge, size in each.items() if size}
    expected = predicted(STRATEGIES[name], ranks, virtual_stages, schedule, cached)
    forward = {(stage, stage + 1): MICROBATCHES * size for stage, size in enumerate(expected)}
    backward = {(stage + 1, stage): MICROBATCHES * size for stage, size in enumerate(expected)}
    assert sent == forward | backward
    grows = name in ("full", "full_window", "block", "block_shared", "denseformer") and virtual_stages > 1
    assert any(peak for _, peak, _ in results) == (cached and grows)


def test_a_strategy_of_ones_own(tmp_path):
    """A parameter that all stages use has one value on all ranks; a tensor that is partial and done travels once."""
    options = {"schedule": "Interleaved1F1B", "virtual_stages": 2}
    (first, _, mine), (_, _, others) = on_ranks(2, train, tmp_path, Odd, options)
    expected = train(tmp_path, Odd, None)
    assert mine["residual.scale"].equal(others["residual.scale"])
    assert mine.keys() | others.keys() == expected.keys()
    for name, value in (mine | others).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    token = 4 * BATCH * TOKENS * MICROBATCHES * 16  # a source of all microbatches
    assert first[0, 1] == 3 * token  # the pair, and the partial once
    assert first[2, 3] == token  # the pair is there already
