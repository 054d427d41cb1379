"""Every row of the paper's tables is found by strategy and options, and by nothing else."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from attnres_lit.experiments import paper

PRESETS = Path(__file__).parents[2] / "configs" / "experiment"


def residual_of(options):
    """The strategy and options of a label of a sweep."""
    said = yaml.safe_load((PRESETS / options["model.residual"]).read_text())
    changed = {key.rpartition(".")[2]: value for key, value in options.items() if key != "model.residual"}
    return said["class_path"].rpartition(".")[2], said.get("init_args", {}) | changed


def test_the_ablation_has_every_row_of_table_4_once():
    axis = yaml.safe_load((PRESETS / "ablation.yaml").read_text())["axes"]["residual"]
    rows = [paper.row_of(*residual_of(options)) for options in axis.values()]
    assert rows == list(paper.TABLE_4)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("FullAttnRes", {"window": 4}),
        ("FullAttnRes", {"query": "input", "mixing": "sigmoid"}),
        ("BlockAttnRes", {"num_blocks": 8}),
        ("BlockAttnRes", {"block_size": 8, "num_heads": 4}),
        ("MHC", {"projection": "permutations"}),
        ("HyperConnections", {}),
        ("ScaledResidual", {}),
    ],
)
def test_other_options_are_no_row(strategy, options):
    assert paper.row_of(strategy, options) is None


@pytest.mark.parametrize(
    ("strategy", "options", "column"),
    [
        ("PreNorm", {}, "PreNorm"),
        ("BlockAttnRes", {"num_blocks": 8}, "Block"),
        ("BlockAttnRes", {"num_blocks": None, "block_size": None}, "Block"),
        ("BlockAttnRes", {"block_size": 4}, None),
        ("BlockAttnRes", {"num_blocks": 4}, None),
        ("FullAttnRes", {}, "Full"),
        ("FullAttnRes", {"window": 8}, None),
        ("MHC", {"projection": "permutations"}, "mHC-lite"),
        ("MHC", {}, None),
    ],
)
def test_columns_of_table_2(strategy, options, column):
    assert paper.column_of(strategy, options) == column


def test_the_numbers_agree_with_one_another():
    at_436 = {name: losses[436] for name, losses in paper.SCALING.items()}
    assert at_436["PreNorm"] == paper.BASELINE == paper.TABLE_4[0].loss
    assert at_436["Full"] == paper.BLOCK_SIZES[1]
    assert at_436["Block"] == paper.BLOCK_SIZES[4]
    gains = paper.ARCHITECTURES["PreNorm"] - paper.ARCHITECTURES["AttnRes"]
    assert (round(gains.min(), 3), round(gains.max(), 3)) == (0.019, 0.063)  # as the text says
    low, high = paper.ARCHITECTURE_LOSSES
    assert all(low <= table.min() and table.max() <= high for table in paper.ARCHITECTURES.values())
    for name, (a, alpha) in paper.FITS.items():  # the fits pass near their points, at 6 N D
        for size, tokens in {194: 38.7, 528: 119.0}.items():
            compute = 6 * size * 1e6 * tokens * 1e9 / 8.64e19
            assert a * compute**-alpha == pytest.approx(paper.SCALING[name][size], abs=0.05)
    assert np.isfinite(gains).all()
