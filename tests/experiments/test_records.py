"""Logs of killed, resumed, diverged and unfinished runs; settings and variants."""

import math

import pytest
from torch.utils.tensorboard import SummaryWriter

from attnres_lit.experiments.logs import read_logs
from attnres_lit.experiments.records import read_run, read_runs
from attnres_lit.experiments.variants import labels, settings
from experiments.run_folders import ending_at, write_run

METRIC = "val/loss"


def test_a_resumed_run_goes_on_in_the_later_log(tmp_path):
    folder = write_run(tmp_path, "a", rows=[(20, {METRIC: 3.0}), (40, {METRIC: 2.5})])
    write_run(tmp_path, "b", rows=[(40, {METRIC: 2.0}), (60, {METRIC: 1.5})])
    write_run(tmp_path, "c", rows=[(60, {METRIC: 1.0})])
    for name, version in (("b", 2), ("c", 10)):  # by number, not by name
        (tmp_path / name / "csv/version_0").rename(folder / f"csv/version_{version}")
    assert read_logs(folder)[METRIC].to_dict() == {20: 3.0, 40: 2.0, 60: 1.0}


@pytest.mark.parametrize("torn", ["59,1.7", "59,", "59", "59,1.7,8\n", "x,1.7\n", "59,1.7.2\n", "\n", "\0\0\n"])
def test_a_row_that_is_no_row_is_skipped(tmp_path, torn):
    folder = write_run(tmp_path, "a", rows=ending_at(2.0))
    with (folder / "csv/version_0/metrics.csv").open("a") as log:
        log.write(torn)
    assert read_logs(folder)[METRIC].to_dict() == {20: 3.0, 40: 2.0}


def test_tensorboard_where_there_is_no_csv(tmp_path):
    with SummaryWriter(str(tmp_path / "a")) as writer:
        for step, value in ((19, 3.0), (39, 2.0)):
            writer.add_scalar(METRIC, value, step)
            writer.add_scalar("epoch", 0, step)
    (run,) = read_runs([tmp_path])
    assert {name: curve.to_dict() for name, curve in run.curves.items()} == {METRIC: {20: 3.0, 40: 2.0}}
    assert (run.name, run.costs, run.residual, run.state(METRIC)) == ("a", None, "", "finished")


@pytest.mark.parametrize(
    ("rows", "max_steps", "state"),
    [
        (ending_at(2.0), 40, "finished"),
        (ending_at(2.0), 59, "finished"),  # 60 would be the next validation
        (ending_at(2.0), 60, "at step 40 of 60"),
        ([(40, {METRIC: 2.0}), (50, {"train/loss": 1.0})], 60, "at step 50 of 60"),
        ([(20, {METRIC: 2.0}), (40, {METRIC: math.nan})], 40, "diverged"),
        ([(40, {"train/loss": 1.0})], 40, f"has no {METRIC}"),
    ],
)
def test_states(tmp_path, rows, max_steps, state):
    assert read_run(write_run(tmp_path, "a", rows=rows, max_steps=max_steps)).state(METRIC) == state


def test_what_a_run_cost(tmp_path):
    run = read_run(write_run(tmp_path, "a", rows=ending_at(2.0)))
    attention, mlp = 4 * 16 * 16, 3 * 16 * 48
    assert run.costs
    assert run.costs.sublayers == 2 * (attention + mlp + 2 * 16)  # and two norms
    assert run.costs.parameters == run.costs.sublayers + 2 * 257 * 16 + 16
    assert run.tokens == 40 * 8 * 16
    assert run.costs.flops_per_token == 3 * 2 * (2 * (attention + mlp + 16 * 17) + 257 * 16)


def test_a_strategy_that_is_not_installed_costs_nobody_knows_what(tmp_path):
    run = read_run(write_run(tmp_path, "a", "of_a_colleague.Residual", {"depth": 3}, rows=ending_at(2.0)))
    assert (run.costs, run.flops, run.residual, run.options) == (None, None, "Residual", {"depth": 3})


def test_variants_differ_in_the_seed_alone(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, f"same-seed={seed}", seed=seed, rows=ending_at(2.0))
        write_run(tmp_path, f"other-seed={seed}", seed=seed, rows=ending_at(2.0), sizes={"dim": 16 + 16 * seed})
    variants = {run.name: run.variant for run in read_runs([tmp_path])}
    assert variants == {
        "same-seed=0": "same",
        "same-seed=1": "same",
        "other-seed=0": "other-seed=0",
        "other-seed=1": "other-seed=1",
    }


def test_a_run_counts_once_and_two_of_one_name_get_their_folders(tmp_path):
    for place in ("here", "there"):
        write_run(tmp_path / place, "PreNorm", rows=ending_at(2.0))
    names = [run.name for run in read_runs([tmp_path / "there", tmp_path, tmp_path / "here" / "PreNorm"])]
    assert names == ["there/PreNorm", "here/PreNorm"]


@pytest.mark.parametrize("order", ["{0}-{1}", "{1}-{0}"])
def test_settings_are_what_all_their_variants_share(tmp_path, order):
    for size in (16, 32):
        for name, strategy in (("PreNorm", "PreNorm"), ("Block-N2", "BlockAttnRes")):
            folder = f"{order.format(name, f'D{size}')}-seed=0"
            write_run(tmp_path, folder, strategy, rows=ending_at(2.0), sizes={"dim": size})
    write_run(tmp_path, f"{order.format('Full', 'D32')}-seed=0", "FullAttnRes", rows=ending_at(2.0), sizes={"dim": 32})
    found = settings(read_runs([tmp_path]), METRIC, None)
    assert [setting.label for setting in found] == ["D16", "D32"]  # by compute
    assert labels(found) == ["PreNorm", "Block-N2", "Full"]
    assert [setting.baseline for setting in found] == ["PreNorm", "PreNorm"]


def test_without_prenorm_the_first_run_is_the_baseline(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path, name, "FullAttnRes", rows=ending_at(2.0))
    (one,) = settings(read_runs([tmp_path / "b", tmp_path / "a"]), METRIC, None)
    assert one.baseline == "b"
