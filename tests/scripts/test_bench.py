"""The benchmarks run, and the bytes they count stay where they were promised. Nothing here is timed."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(script, *arguments):
        path = tmp_path / "rows.json"
        module = __import__(script)
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--json", str(path)])
        module.main()
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        rows = json.loads(path.read_text())["rows"]
        assert len(table) == len(rows) + 2
        return {row.get("case") or row["operator"]: row for row in rows}

    return run


SIZES = ["--rounds", "1", "--dim", "256", "--tokens", "64", "--batch", "1"]


def test_saved_activations_of_every_strategy(run):
    again = "checkpoint_activations=read"
    bounds = {
        "denseformer": 1.06,
        "block": 1.10,
        f"block:{again}": 1.05,
        "block:two_phase=true": 1.10,
        "full": 1.12,
        f"full:{again}": 1.05,
        "mhc": 2.0,
    }
    rows = run("bench_step", *SIZES, "--cases", *bounds, "prenorm:checkpoint_activations=true")
    for case, bound in bounds.items():
        assert 1.0 <= rows[case]["x saved"] <= bound, case
        assert rows[case]["tokens/s"] > 0
        assert rows[case]["peak MiB"] > rows[case]["saved MiB"] > 0
    assert rows["prenorm:checkpoint_activations=true"]["x saved"] < 0.3


def test_decode_and_bf16(run):
    rows = run("bench_step", "--rounds", "1", "--dim", "32", "--layers", "2", "--decode", "--cases", "block")
    assert set(rows["block"]) == {"case", "x time", "ms", "against"}
    sizes = ["--rounds", "1", "--dim", "32", "--layers", "2", "--tokens", "8", "--dtype", "bf16"]
    assert run("bench_step", *sizes, "--cases", "block")["block"]["x time"] > 0


def test_operator_keeps_scalars_only(run):
    rows = run("bench_op", "--rounds", "1", "--sources", "3", "--shape", "2", "64", "128")
    source = 2 * 64 * 128 * 4 / 2**20
    assert rows["stack + einsum"]["extra MiB"] > 3 * source
    assert rows["eager"]["extra MiB"] < 0.1 * source
    assert all(row["error"] < 1e-4 for row in rows.values())
