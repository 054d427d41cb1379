"""One thread a process: on few cores, more make small tensors slower, and a busy machine much slower.

And a place for runs of the command line.
"""

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A folder of its own with a small corpus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    (tmp_path / "corpus").mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))[:8]:
        (tmp_path / "corpus" / f"{path.stem}.txt").write_text(path.read_text()[:8000])
    return tmp_path
