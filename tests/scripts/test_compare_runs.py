"""compare_runs reads logs, also of resumed runs, and says where there are none."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_runs.py"


def log(run: Path, version: int, rows: str) -> None:
    path = run / f"csv/version_{version}/metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("step,train/loss,val/bpb\n" + rows)


def test_table_and_picture(tmp_path):
    log(tmp_path / "one", 0, "99,,3.0\n149,1.0,\n")
    log(tmp_path / "one", 1, "199,,2.0\n")
    log(tmp_path / "two", 0, "99,,2.5\n199,,2.25\n")
    out = tmp_path / "c.png"
    command = [sys.executable, str(SCRIPT), str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| one | 200 | 2.0000 | +0.0000 |" in done.stdout
    assert "| two | 200 | 2.2500 | +0.2500 |" in done.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_logs_is_named(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} has no val/bpb in csv/version_*/metrics.csv\n"
