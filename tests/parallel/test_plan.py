"""`plan` as a whole: from Python, and as a user types it."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from attnres_lit.cli import main
from attnres_lit.model import Transformer, TransformerConfig
from attnres_lit.parallel.activations import Precision, sublayer_bytes
from attnres_lit.parallel.cost_model import Hardware
from attnres_lit.parallel.plan import data_parallel_bytes, plan, recomputed_bytes
from attnres_lit.parallel.settings import PipelineSettings
from attnres_lit.parallel.show import si, table, timeline
from attnres_lit.planning import layout
from attnres_lit.residual import BlockAttnRes, PreNorm
from residual.models import CONFIGS, factory_from_yaml

ROOT = Path(__file__).parents[2]
BLOCK = str(ROOT / "configs/block.yaml")


def model(residual=BlockAttnRes, layers=16, dim=64, **options):
    with torch.device("meta"):
        return Transformer(TransformerConfig(100, dim, layers, 4, max_seq_len=64), residual, **options)


def planned(made, ranks=4, count=8, schedule="Interleaved1F1B", virtual=2, cache="auto", **options):
    settings = PipelineSettings(ranks, count, schedule, virtual, cache)
    return plan(made, settings, options.pop("hardware", Hardware()), 8, 64, **options)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("again", [False, "read", True])
def test_of_every_strategy(path, again):
    made = model(factory_from_yaml(path), checkpoint_activations=again)
    numbers, step = planned(made)
    assert json.loads(json.dumps(numbers)) == numbers
    assert sum(rank["parameters"] for rank in numbers["ranks"]) == sum(p.numel() for p in made.parameters())
    assert numbers["step"]["seconds"] == step.seconds > 0
    assert 0 < numbers["step"]["bubble"] < 1
    for of in numbers["boundaries"]["list"]:
        assert of["naive"] >= of["received"] >= of["exact"] > 0
    text = table(numbers)
    assert type(made.residual).__name__ in text
    assert "Interleaved1F1B, 4 ranks x 2 stages" in text


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("bf16-true", 0.4, 1.2), ("16-mixed", 0.4, 1.2), ("64", 1.7, 2.1)]
)
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_activations_follow_the_precision(path, precision, least, most):
    """Relative to fp32; mHC keeps fp32 copies of its streams in half precision."""
    made = model(factory_from_yaml(path))
    kept, single = (planned(made, precision=each).numbers["ranks"][1]["activation_bytes"] for each in (precision, "32"))
    assert least * single < kept < most * single


def test_the_cache_saves_traffic_memory_and_time():
    hardware = Hardware(link_bandwidth=1e9)
    with_cache, without = (planned(model(), cache=cache, hardware=hardware).numbers for cache in ("auto", False))
    assert with_cache["pipeline"]["cache"]
    assert with_cache["boundaries"] == without["boundaries"]
    assert with_cache["step"]["seconds"] < without["step"]["seconds"]
    for one, other in zip(with_cache["ranks"], without["ranks"], strict=True):
        assert one["activation_bytes"] < other["activation_bytes"]
        assert one["parameters"] == other["parameters"]


def test_prenorm_has_nothing_to_cache():
    numbers = planned(model(PreNorm)).numbers
    assert not numbers["pipeline"]["cache"]
    tensor = 64 * 64 * 2  # one sequence of 64 tokens, width 64, bf16
    assert numbers["boundaries"]["naive"] == {"bytes": 7 * tensor, "peak_bytes": tensor}
    with pytest.raises(ValueError, match="nothing to cache"):
        planned(model(PreNorm), cache=True)


def test_recomputation_trades_time_for_memory():
    plain, read, whole = (planned(model(checkpoint_activations=again)).numbers for again in (False, "read", True))
    kept = [sum(rank["activation_bytes"] for rank in each["ranks"]) for each in (plain, read, whole)]
    assert kept[0] > kept[1] > kept[2]
    seconds = [each["step"]["seconds"] for each in (plain, read, whole)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_layers_of_unequal_width():
    """Two ranks, one of which has the wide MLP: it takes more memory and time, and computes it again."""
    config = TransformerConfig(100, 64, 4, 4, hidden_dim=[16, 1024, 16, 16], max_seq_len=64)
    for again in (False, True):
        with torch.device("meta"):
            made = Transformer(config, PreNorm, checkpoint_activations=again)
        numbers = planned(made, 2, schedule="GPipe", virtual=1, split_points=[3]).numbers  # site 3 is the wide one
        assert [stage["parameters"] for stage in numbers["stages"]] == [
            sum(p.numel() for p in (*made.embedding.parameters(), *sites(made, range(3)))),
            sum(p.numel() for p in (*made.head.parameters(), *made.norm.parameters(), *sites(made, range(3, 8)))),
        ]
        first, second = (rank["activation_bytes"] for rank in numbers["ranks"])
        wide = 8 * 64 * 4 * 1024 * 2  # 8 microbatches of 64 tokens, four tensors of that width, bf16
        assert second - first > (wide / 8 if again else wide)
    sizes = Precision.of("bf16-mixed")
    kept = sublayer_bytes(config, sizes)
    back = recomputed_bytes(PreNorm(8, 64), [range(3), range(3, 8)], kept, sizes)
    streams = recomputed_bytes(PreNorm(8, 64), [range(3), range(3, 8)], [0] * 8, sizes)
    assert back[0] == streams[0] + kept[0] + kept[1]
    assert back[1] == pytest.approx(kept[3], rel=0.1)  # without the attention of its layer, which is before the cut


def sites(made, of):
    return [parameter for site in of for parameter in made.sublayers[str(site)].parameters()]


def test_a_single_rank_without_a_pipeline():
    numbers = planned(model(), 1, 1, "1F1B", 1).numbers
    assert numbers["step"]["bubble"] == 0
    assert numbers["boundaries"]["list"] == []
    # what a matrix product reaches is what is left once the residual has moved its bytes
    assert 0 < numbers["step"]["share_of_device_flops"] < 1
    ideal = planned(model(), 1, 1, "1F1B", 1, hardware=Hardware(memory_bandwidth=1e30)).numbers
    assert ideal["step"]["share_of_device_flops"] == pytest.approx(1)


def test_data_parallel_and_fsdp():
    sizes = Precision.of("bf16-mixed")
    assert data_parallel_bytes(1000, sizes, 1, 1) == 0
    assert data_parallel_bytes(1000, sizes, 4, 1) == 2 * 3 / 4 * 4000  # fp32 gradients, there and back
    assert data_parallel_bytes(1000, sizes, 1, 4) == 3 / 4 * (2 * 2000 + 4000)
    one, two = (planned(model(), fsdp_size=size, data_parallel_size=2).numbers for size in (1, 4))
    assert [each["layout"]["devices"] for each in (one, two)] == [8, 32]
    assert two["ranks"][0]["state_bytes"] == one["ranks"][0]["state_bytes"] // 4
    assert two["step"]["tokens_per_second"] == pytest.approx(4 * one["step"]["tokens_per_second"])
    with pytest.raises(ValueError, match="fsdp_size=0 must be at least 1"):
        planned(model(), fsdp_size=0)


def test_512_stages(tmp_path):
    made = model(partial(BlockAttnRes, num_blocks=32), layers=256)
    settings = PipelineSettings(64, 16, "Interleaved1F1B", 8)
    numbers, step = plan(made, settings, Hardware(), 16, 64)
    assert len(numbers["stages"]) == 512
    assert "... 48 more" in table(numbers)
    timeline(step, tmp_path / "large.png", "large")
    assert (tmp_path / "large.png").stat().st_size > 10_000


def test_a_model_with_values_is_left_as_it_is():
    made = Transformer(TransformerConfig(100, 16, 4, 2, max_seq_len=64), BlockAttnRes)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    planned(made, 2, 8)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_prefixes():
    assert [si(x, "B") for x in (0, 12, 1.5e3, 2e15)] == ["0 B", "12 B", "1.5 kB", "2 PB"]
    assert [si(x, "s") for x in (3e-3, 4.2e-5)] == ["3 ms", "42 µs"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The command line, in an empty folder: there are no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])

    def run(*flags, config=BLOCK):
        capfd.readouterr()
        code = 0
        try:
            main(["plan", "--config", config, *flags])
        except SystemExit as exit:
            code = exit.code
        out, err = capfd.readouterr()
        return code, out, [line for line in err.splitlines() if line.startswith("error: ")]

    return run


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_of_every_config(run, config, tmp_path):
    code, out, errors = run("--pipeline_parallel_size=4", "--schedule=1F1B", config=str(config))
    assert (code, errors) == (0, [])
    assert "1F1B, 4 ranks x 1 stages, 16 microbatches of 1 x 128 tokens" in out
    assert list(tmp_path.iterdir()) == []


def test_writes_what_it_found(run, tmp_path):
    gpu = ["--config", str(ROOT / "configs/parallel/gpu.yaml")]  # there need not be one
    code, out, _ = run(*gpu, "--pipeline_parallel_size=2", "--virtual_stages=3", "--out=plans/a")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "plans/a").iterdir()) == ["plan.json", "timeline.png"]
    numbers = json.loads((tmp_path / "plans/a/plan.json").read_text())
    assert numbers["layout"]["precision"] == "bf16-mixed"
    assert numbers["pipeline"]["schedule"] == "Interleaved1F1B"
    assert numbers["model"]["vocab_size"] == 257
    assert len(numbers["stages"]) == 6
    assert out.strip() == table(numbers)


@pytest.mark.parametrize(
    ("trainer", "flags", "expected"),
    [
        ({}, {}, (1, 1, 1)),
        ({"devices": "auto"}, {}, (1, 1, 1)),
        ({"devices": 4, "strategy": "ddp"}, {}, (1, 1, 4)),
        ({"devices": [0, 2], "num_nodes": 3, "strategy": "ddp"}, {}, (1, 1, 6)),
        ({"devices": "4", "strategy": "fsdp"}, {}, (1, 4, 1)),
        ({"devices": 8, "strategy": {"data_parallel_size": "auto"}}, {}, (1, 8, 1)),
        ({"devices": 8, "strategy": {"data_parallel_size": 4}}, {}, (1, 4, 2)),
        ({"devices": 4, "strategy": {"pipeline_parallel_size": "auto"}}, {}, (4, 1, 1)),
        ({"devices": 8, "strategy": {"pipeline_parallel_size": 4, "fully_shard": False}}, {}, (4, 1, 2)),
        ({"devices": 8, "strategy": {"pipeline_parallel_size": 4, "fully_shard": True}}, {}, (4, 2, 1)),
        ({"devices": 8, "strategy": "ddp"}, {"pipeline_parallel_size": 2}, (2, 1, 4)),
        ({"devices": 8, "strategy": "ddp"}, {"fsdp_size": 2}, (1, 2, 4)),
        ({}, {"pipeline_parallel_size": 8}, (8, 1, 1)),
    ],
)
def test_takes_the_layout_from_the_trainer(trainer, flags, expected):
    """Ranks of a pipeline, shards of a stage, copies of the model."""
    trainer = {"devices": 1, "num_nodes": 1, "strategy": "auto"} | trainer
    if isinstance(trainer["strategy"], dict):
        trainer["strategy"] = Namespace(class_path="Strategy", init_args=Namespace(trainer["strategy"]))
    found = layout(
        Namespace({"pipeline_parallel_size": None, "fsdp_size": None, "trainer": Namespace(trainer)} | flags)
    )
    assert tuple(found[name] for name in ("pipeline_parallel_size", "fsdp_size", "data_parallel_size")) == expected


def test_flags_come_before_the_strategy(run):
    Path("layout.yaml").write_text(
        "trainer:\n  devices: 4\n  strategy:\n    class_path: lightning.pytorch.strategies.ModelParallelStrategy\n"
        "    init_args:\n      data_parallel_size: 2\n      tensor_parallel_size: 1\n"
    )
    for flags, devices in (([], 4), (["--data_parallel_size=3"], 6)):
        code, _, errors = run("--config", "layout.yaml", "--out=a", *flags)
        assert (code, errors) == (0, [])
        assert json.loads(Path("a/plan.json").read_text())["layout"]["devices"] == devices


def test_any_size(run):
    """64 layers of width 8192 are 52 billion parameters."""
    sizes = ["--model.config.dim=8192", "--model.config.num_layers=64", "--model.config.num_heads=64"]
    code, out, _ = run(*sizes, "--pipeline_parallel_size=8", "--precision=bf16-mixed")
    assert code == 0
    assert "parameters            51.6 G" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline_parallel_size=13"], "13 pipeline stages need at least as many sites, num_layers=6 has 12"),
        (["--pipeline_parallel_size=2", "--virtual_stages=2", "--schedule=GPipe"], "GPipe has one stage a rank"),
        (["--pipeline_parallel_size=2", "--schedule=Zigzag"], "unknown schedule 'Zigzag': known are GPipe, 1F1B"),
        (["--pipeline_parallel_size=4", "--num_microbatches=2"], "as many microbatches as stages, 4"),
        (["--num_microbatches=5"], "num_microbatches=5 must divide the batch size, 16"),
        (["--pipeline_parallel_size=2", "--model.config.tie_embeddings=true"], "tied embeddings across stages"),
        (["--link_bandwidth=0"], "link_bandwidth=0.0 must be above 0"),
        (["--precision=fp8"], "unknown precision fp8"),
        (["--schedule=InterleavedZeroBubble", "--model.compile=true"], "compiled sublayers cannot"),
        (["--pipeline_parallel_size=2", "--split_points=[12]"], "must be 1 increasing sites between 1 and 11"),
    ],
)
def test_a_mistake_gets_one_line(run, flags, message, tmp_path):
    code, _, errors = run(*flags, "--out=plans")
    assert code == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_the_docs_have_what_the_script_prints(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import plan_tables

    plan_tables.tensors()
    printed = [line.replace("|  |", "| |") for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 5
    assert set(printed) <= set((ROOT / "docs/parallelism.md").read_text().splitlines())
    small = ["--layers=16", "--dim=64", "--heads=4", "--ranks=2", "--microbatches=4", "--link_bandwidth", "50e9"]
    monkeypatch.setattr(sys, "argv", ["plan_tables", *small])
    plan_tables.main()
    assert "| Block, cached | " in capsys.readouterr().out
