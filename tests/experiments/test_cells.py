"""What a sweep's YAML says, and what is refused in one line."""

import math
import re

import pytest
import yaml

from attnres_lit.experiments.cells import Budget, read_sweep

BUDGET = {"steps": 100}


@pytest.fixture
def write(tmp_path):
    """Writes `sweeps/sweep.yaml`, with a base config and a residual beside the folder."""
    (tmp_path / "sweeps").mkdir()
    for name in ("base.yaml", "more.yaml", "other.yaml"):
        (tmp_path / name).write_text("")

    def write(said=None, **changes):
        if said is None:
            said = {"config": "../base.yaml", "axes": {"model.config.dim": [16]}, "budget": BUDGET} | changes
            said = {key: value for key, value in said.items() if value is not None}
        path = tmp_path / "sweeps/sweep.yaml"
        path.write_text(said if isinstance(said, str) else yaml.safe_dump(said, sort_keys=False))
        return path

    return write


def names(path):
    return [cell.name for cell in read_sweep(path).cells]


def refused(path):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - its text is what is tested
        read_sweep(path)
    assert "\n" not in str(error.value)
    assert "sweep.yaml" in str(error.value)
    return str(error.value)


def test_cells_are_the_product_of_the_axes(write):
    sizes = {"small": {"model.config.dim": 16, "model.config.num_layers": 2}, "large": {"model.config.dim": 32}}
    axes = {"seed_everything": [0, 1], "size": sizes, "model.residual.num_blocks": [2, 4]}
    sweep = read_sweep(write(axes=axes, set={"data.seq_len": 32, "model.config.num_layers": 6}))
    assert [cell.name for cell in sweep.cells] == [
        f"{size}-num_blocks={blocks}-seed={seed}" for seed in (0, 1) for size in sizes for blocks in (2, 4)
    ]
    assert sweep.cells[3].settings == {
        "data.seq_len": 32,
        "model.config.num_layers": 6,
        "seed_everything": 0,
        "model.config.dim": 32,
        "model.residual.num_blocks": 4,
    }
    assert sweep.cells[0].settings["model.config.num_layers"] == 2  # a cell's own comes before what all share
    assert {cell.budget for cell in sweep.cells} == {Budget(steps=100)}


def test_labels_are_names_of_folders(write):
    values = [1.0e-3, None, True, [16, 464], "a/b c", "../other.yaml"]
    assert names(write(axes={"model.config.x": values})) == [
        "x=0.001",
        "x=null",
        "x=true",
        "x=_16,_464",
        "x=a_b_c",
        "x=other",
    ]
    assert names(write(axes={"run": {"../up": {}, "..": {}}})) == ["up", "_"]


def test_paths_are_relative_to_the_sweep(write, tmp_path, monkeypatch):
    path = write(
        config=["../base.yaml", "../more.yaml"],
        set={"data": "../other.yaml"},
        axes={"residual": {"mine": {"model.residual": "../other.yaml", "model.residual.sizes": [1, 2]}}},
    )
    monkeypatch.chdir(tmp_path / "sweeps")
    sweep = read_sweep(path)
    assert sweep.arguments(sweep.cells[0]) == [
        "--config",
        "../base.yaml",
        "--config",
        "../more.yaml",
        "--data=../other.yaml",
        "--model.residual=../other.yaml",
        "--model.residual.sizes=[1, 2]",
    ]
    monkeypatch.chdir(tmp_path)
    assert read_sweep(path).configs == ["base.yaml", "more.yaml"]


def test_a_cell_may_have_a_budget_of_its_own(write):
    sizes = {
        "a": {},
        "b": {"budget.tokens": 5000},
        "c": {"budget.validations": 2, "model.config.dim": 64},
    }
    cells = {
        cell.name: cell for cell in read_sweep(write(axes={"size": sizes}, budget={"steps": 50, "warmup": 0})).cells
    }
    assert cells["a"].budget == Budget(steps=50, warmup=0)
    assert cells["b"].budget == Budget(tokens=5000, warmup=0)  # in place of the steps of the others
    assert cells["c"].budget == Budget(steps=50, warmup=0, validations=2)
    assert cells["c"].settings == {"model.config.dim": 64}
    assert len(names(write(axes={"size": {"b": sizes["b"]}}, budget=None))) == 1  # then the sweep need not have one


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 100}, 100),
        ({"steps": 95}, 100),
        ({"steps": 95, "validations": 5}, 95),
        ({"tokens": 32_000}, 1000),
        ({"tokens_per_parameter": 20}, 630),  # 625 steps, and 10 validations at equal distances
        ({"flops": 6.4e9}, 200),
        ({"steps": 1}, 10),
    ],
)
def test_steps_of_a_budget(budget, steps):
    """Of a model of 1,000 parameters and 1e6 FLOPs a token, 32 tokens a step."""
    assert Budget(**budget).num_steps(1000, 32, 1e6) == steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "unknown key 'axis'; known are config, set, axes, budget; did you mean axes"),
        ({"axes": None}, "`axes` must say in what the cells differ"),
        ({"axes": {}}, "`axes` must say in what the cells differ"),
        ({"axes": [1, 2]}, "`axes` must say in what the cells differ"),
        ({"axes": {"model.config.dim": []}}, "axis 'model.config.dim' is empty: give it a list of values, or labels"),
        ({"axes": {"model.config.dim": 64}}, "axis 'model.config.dim' is empty"),
        ({"axes": {"size": {"small": 64}}}, "size.small must be options with values, such as model.config.dim: 64"),
        ({"axes": {"model.config.dim": [16, 16]}}, "two cells are called dim=16: give the values of an axis different"),
        ({"axes": {"size": {"a b": {}, "a/b": {}}}}, "two cells are called a_b"),
        ({"set": [1]}, "set must be options with values"),
        ({"set": {"data": "no.yaml"}}, "set: there is no "),
        ({"axes": {"r": {"a": {"model.residual": "no.yaml"}}}}, "r.a: there is no "),
        ({"config": None}, "`config` must name the config that all cells start from"),
        ({"config": 3}, "`config` must name the config that all cells start from"),
        ({"config": "no.yaml"}, "config: there is no "),
        ({"budget": None}, "budget: give one of steps, tokens, tokens_per_parameter, flops, not none"),
        ({"budget": 500}, "`budget` must say how long a cell trains, for example steps: 500"),
        ({"budget": {"steps": 5, "tokens": 5}}, "budget: give one of steps, .*, not steps, tokens"),
        ({"budget": {"step": 5}}, "unknown budget 'step'; known are .*; did you mean steps"),
        ({"axes": {"a": {"b": {"budget.flop": 5}}}}, "unknown budget 'flop'; .*; did you mean flops"),
        ({"axes": {"a": {"b": {"budget.flops": 5, "budget.tokens": 5}}}}, "budget: give one of .*, not tokens, flops"),
        ({"budget": {"steps": 0}}, "budget.steps is 0: it must be above 0"),
        ({"budget": {"steps": 10.5}}, "budget.steps is 10.5: it must be a whole number"),
        ({"budget": {"steps": True}}, "budget.steps is True: it must be a number"),
        ({"budget": {"flops": math.inf}}, "budget.flops is inf: it must be above 0"),
        ({"budget": {"steps": 5, "warmup": 1}}, r"budget.warmup is 1: it must be in \[0, 1\)"),
        ({"budget": {"steps": 5, "validations": 2.5}}, "budget.validations is 2.5: it must be a whole number"),
        ({"budget": {"steps": 5, "validations": 0}}, "budget.validations is 0: it must be above 0"),
    ],
)
def test_a_mistake_gets_one_line(changes, message, write):
    assert re.search(message, refused(write(**changes)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no sweep: it must have the keys config, set, axes, budget"),
        ("- 1\n- 2", "is no sweep"),
        ("a: [", "cannot be read: while parsing"),
        ("axes: {size: {small: {}, large: {}, small: {}}}", "small is there twice"),
        ("axes: {seed_everything: [0]}\naxes: {size: [1]}", "axes is there twice"),
        # without a dot and a sign YAML reads text
        (
            "config: ../base.yaml\naxes: {seed_everything: [0]}\nbudget: {tokens: 1e6}",
            "budget.tokens is '1e6': it must be",
        ),
    ],
)
def test_other_files_are_refused(text, message, write):
    assert message in refused(write(text))


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"the sweep .*no\.yaml cannot be read: .*No such file"):
        read_sweep(tmp_path / "no.yaml")
