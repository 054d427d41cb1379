"""Sharded parameters: several processes train as one that accumulates their batches."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from attnres_lit.model import Transformer
from attnres_lit.model.init import materialize
from attnres_lit.parallel import FullyShardedStrategy, fsdp
from attnres_lit.residual import BlockAttnRes, PreNorm
from parallel.runs import Shares, alone, assert_same_training, differences, fast, interleaved, on_several, train, whole
from parallel.world import on_ranks
from residual.models import CONFIGS, build, factory_from_yaml
from training.tiny import Tokens, tiny_config, tiny_module, tiny_trainer


@pytest.fixture
def folder(tmp_path_factory):
    """One for all tests, so that they share what one process does."""
    return tmp_path_factory.getbasetemp()


@fast(("block", 2), ("mhc", 2), ("prenorm", 4))
def test_equals_one_process(residual, size, folder):
    assert_same_training(on_several(size, folder, residual, "fsdp", meta=True), alone(folder, residual, size))


def test_muon(folder):
    """Its updates are rounded to bf16: what differs in the last bits of a gradient may differ there."""
    options = {"steps": 10, "optimizer": "muon"}
    result = on_several(2, folder, "block", "fsdp", meta=True, **options)
    losses, gradients, parameters = differences(result, alone(folder, "block", 2, **options))
    assert losses < 2e-4
    assert gradients < 1e-5
    assert parameters < 1e-2


def test_a_model_that_has_values_keeps_them(folder):
    assert_same_training(on_several(2, folder, "full", "fsdp"), alone(folder, "full", 2))


def test_tied_embeddings(folder):
    tied = {"config": tiny_config(num_layers=3, tie_embeddings=True), "steps": 10}
    expected = train(folder, "block", accumulate=2, **tied)
    assert_same_training(on_several(2, folder, "block", "fsdp", meta=True, **tied), expected)


def recomputed(folder, residual, precision):
    options = {"steps": 3, "meta": True, "trainer": {"precision": precision, "gradient_clip_val": 0.5}}
    return [train(folder, residual, "fsdp", checkpoint_activations=again, **options) for again in (False, "read", True)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("residual", ["block", "mhc"])
def test_recomputed_activations_change_nothing(residual, precision, folder):
    """With "read", backward reads the sources again: the depth parameters must still be gathered."""
    kept, *others = on_ranks(2, recomputed, folder, residual, precision)[0]
    for result in others:
        assert result.losses == kept.losses
        assert all(value.equal(kept.gradients[name]) for name, value in result.gradients.items())
        assert all(value.equal(kept.parameters[name]) for name, value in result.parameters.items())


def train_compiled(folder):
    """With graphs that are traced and differentiated but not turned into code, which takes long; and their number."""
    counter, compile_in_place = CompileCounterWithBackend("aot_eager"), nn.Module.compile
    nn.Module.compile = lambda self: compile_in_place(self, backend=counter)
    return train(folder, "block", "fsdp", meta=True, compile=True), counter.frame_count


def test_compiled_sublayers(folder):
    (result, graphs), (other, _) = on_ranks(2, train_compiled, folder)
    assert graphs == 2
    assert_same_training(interleaved([result, other]), alone(folder, "block", 2))


@pytest.mark.slow
def test_compiled_to_code(folder):
    result = on_several(2, folder, "block", "fsdp", meta=True, compile=True, timeout=400)
    assert_same_training(result, alone(folder, "block", 2))


class Spy(Callback):
    """What a strategy and the sublayers see in the first batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        model, residual = pl_module.model, pl_module.model.residual
        self.seen, read = set(), residual.read

        def spy(sources, site):
            tensors = (*sources.done, *(() if sources.partial is None else (sources.partial,)))
            self.seen |= {("source", each.dtype) for each in tensors}
            self.seen |= {("depth", p.dtype, isinstance(p, DTensor)) for p in residual.parameters()}
            return read(sources, site)

        residual.read = spy
        for name in ("embedding", "head", "sublayers.3.mixer.up_proj", "sublayers.2.norm"):
            model.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: self.seen.add((name, module.weight.dtype))
            )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        del pl_module.model.residual.read
        self.kept = {(type(p), p.dtype, p.grad.dtype) for p in pl_module.parameters()}


def dtypes(folder, fp32_residual):
    spy = Spy()
    trainer = {"precision": "bf16-mixed"}
    result = train(folder, "block", "fsdp", 1, 1, True, [spy], trainer, fp32_residual=fp32_residual)
    return spy.seen, {(cls.__name__, *of) for cls, *of in spy.kept}, result.losses


@pytest.mark.parametrize("fp32_residual", [False, True])
def test_what_each_part_computes_in(fp32_residual, folder):
    """Under bf16-mixed: depth parameters plain and fp32, layers bf16, the embedding in the dtype of the sources."""
    bf16, fp32 = torch.bfloat16, torch.float32
    source = fp32 if fp32_residual else bf16
    seen, kept, (loss,) = on_ranks(2, dtypes, folder, fp32_residual)[0]
    assert seen == {
        ("source", source),
        ("depth", fp32, False),
        ("embedding", source),
        *((name, bf16) for name in ("head", "sublayers.3.mixer.up_proj", "sublayers.2.norm")),
    }
    assert kept == {("DTensor", fp32, fp32)}
    mixed = {"trainer": {"precision": "bf16-mixed"}, "fp32_residual": fp32_residual}
    assert loss == pytest.approx(train(folder, "block", steps=1, **mixed).losses[0], abs=1e-6)


def pieces():
    """Sizes in whole tensors of what the model holds whenever a unit is about to be sharded."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(tiny_config(num_layers=4, vocab_size=3), BlockAttnRes)
    held, fully_shard = [], fsdp.fully_shard

    def watch(modules, **options):
        held.append(sum(p.numel() for p in model.parameters() if not (p.is_meta or isinstance(p, DTensor))))
        return fully_shard(modules, **options)

    fsdp.fully_shard = watch
    fsdp.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    layer = [p for site in "01" for p in model.sublayers[site].parameters()]
    parts = (layer, model.residual.parameters(), model.parameters())
    return held, *(sum(p.numel() for p in part) for part in parts)


def test_no_process_ever_holds_more_than_one_unit():
    """But for the residual, which is small and whole from the start; it is sharded last."""
    held, layer, residual, total = on_ranks(2, pieces)[0]
    assert len(held) == 4 + 2 + 1
    assert sum(held) - residual * (len(held) - 1) == total
    assert max(held) == layer + residual


class Stage(nn.Module):
    """The sites of a pipeline stage, around what is left of the model."""

    def __init__(self, model, sites):
        super().__init__()
        self.model, self.sites = model, sites
        for key in list(model.sublayers):
            if int(key) not in sites:
                del model.sublayers[key]
        model.embedding = None
        if model.config.num_sites - 1 not in sites:
            model.norm = model.head = None

    def forward(self, x):
        sources = self.model.run(self.model.residual.open(x), *self.sites)
        x = self.model.residual.exit(sources)
        return x if self.model.head is None else self.model.head(self.model.norm(x))


def stage_gradients(path, sites, mesh=None):
    with torch.device("meta"):
        model = build(factory_from_yaml(path), torch.float32)
    materialize(model, "residual")
    stage = Stage(model, sites)
    if mesh is None:
        materialize(model)
    else:
        fsdp.shard(model, mesh, root=stage, reshard_after_forward=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 5, 16, generator=generator)  # two microbatches of the same mean gradient on every rank
    for each in x:
        stage(each).square().mean().backward()
    return {name: whole(p.grad) for name, p in stage.named_parameters() if p.grad is not None}


def sharded_stage(path, sites):
    return stage_gradients(path, sites, init_device_mesh("cpu", (dist.get_world_size(),)))


@pytest.mark.parametrize("sites", [range(1, 6), range(7, 12)], ids=["middle", "last"])
@pytest.mark.parametrize("residual", ["prenorm", "mhc"])
def test_a_stage_of_a_pipeline(residual, sites):
    """A layer cut in two, no embedding, and no head but in the last stage; the root is the module around it."""
    path = CONFIGS / f"{residual}.yaml"
    expected = stage_gradients(path, sites)
    gradients = on_ranks(2, sharded_stage, path, sites)[0]
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


class Start(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights = {name: whole(p) for name, p in pl_module.model.named_parameters()}


def started(folder, path, residual):
    start = Start()
    with torch.device("meta"):
        module = tiny_module(residual, init_from=path)
    options = {"strategy": FullyShardedStrategy(), "devices": 2, "max_steps": 1, "callbacks": start}
    tiny_trainer(folder, **options).fit(module, Shares())
    return start.weights


def test_init_from_a_file_of_whole_weights(tmp_path):
    path = str(tmp_path / "one.ckpt")
    trainer = tiny_trainer(tmp_path)
    trainer.fit(tiny_module(seed=7), Tokens())
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)["state_dict"]
    for residual in (BlockAttnRes, PreNorm):
        for weights in on_ranks(2, started, tmp_path, path, residual):
            assert all(stored[f"model.{name}"].equal(value) for name, value in weights.items())


def refused(folder, strategy, **options):
    with pytest.raises(ValueError, match=r"set it to 1|or null") as error:
        tiny_trainer(folder, strategy=strategy(**options), devices=2).fit(tiny_module(), Tokens())
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            ModelParallelStrategy,
            {"data_parallel_size": 1, "tensor_parallel_size": 2},
            "tensor_parallel_size=2: layers are not split here, set it to 1",
        ),
        (
            FullyShardedStrategy,
            {"data_parallel_size": 3},
            "data_parallel_size=3 must be the number of processes, 2, or null",
        ),
    ],
    ids=["tensor-parallel", "size"],
)
def test_what_cannot_work_is_refused(strategy, options, message, tmp_path):
    assert on_ranks(2, refused, tmp_path, strategy, **options) == [message] * 2


def test_a_timeout_is_positive():
    with pytest.raises(ValueError, match=r"timeout=0 must be above 0 seconds"):
        Trainer(accelerator="cpu", devices=2, strategy=FullyShardedStrategy(timeout=0), logger=False)


def test_units_of_what_is_there():
    model = Transformer(tiny_config(), PreNorm)
    del model.sublayers["0"]
    assert list(fsdp.units(model)) == [["sublayers.1"], ["sublayers.2", "sublayers.3"], ["embedding"], ["norm", "head"]]
    model.embedding = model.norm = model.head = None
    assert list(fsdp.units(model)) == [["sublayers.1"], ["sublayers.2", "sublayers.3"]]
