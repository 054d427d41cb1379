"""Imports run one way, Lightning stays where it belongs, and `import attnres_lit.ops` costs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "attnres_lit"
# what each part of the package may import from the others
MAY_USE = {
    "ops": set(),
    "residual": {"ops"},
    "model": {"ops", "residual"},
    "parallel": {"ops", "residual", "model"},
    "data": {"ops", "residual", "model"},
    "inference": {"ops", "residual", "model", "parallel", "data"},
    "training": {"ops", "residual", "model", "parallel", "data", "inference"},
    "experiments": {"ops", "residual", "model", "parallel", "data", "inference", "training", "checks", "runs"},
}
LIGHTNING_LIVES_IN = (
    "training/",
    "data/datamodule.py",
    "parallel/pipeline.py",
    "parallel/sharded.py",
    "parallel/launch.py",
    "cli.py",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    place = path.relative_to(PACKAGE)
    names = set(imports(path))
    if not str(place).startswith(LIGHTNING_LIVES_IN):
        assert not [name for name in names if name.split(".")[0] in ("lightning", "pytorch_lightning")]
    part = place.parts[0]
    if part not in MAY_USE:
        return  # cli.py, __main__.py and the lazy __init__.py see everything
    used = {name.split(".")[1] for name in names if name.startswith("attnres_lit.")}
    assert used <= MAY_USE[part] | {part}
    if part == "model":
        assert {name for name in names if name.startswith("attnres_lit.residual")} <= {
            "attnres_lit.residual.base",
            "attnres_lit.residual.base.Residual",
            "attnres_lit.residual.base.Sources",
        }


def test_no_file_is_called_utils():
    assert not [p for p in FILES if p.stem in ("utils", "common", "helpers", "core")]


def test_strategies_do_not_import_one_another():
    strategies = {"prenorm", "denseformer", "hyper_connections", "mhc", "full_attnres", "block_attnres"}
    for name in strategies:
        used = {
            i.removeprefix("attnres_lit.residual.").split(".")[0] for i in imports(PACKAGE / "residual" / f"{name}.py")
        }
        assert not used & (strategies - {name})


def test_no_long_file_without_a_reason():
    for path in FILES:
        if len(path.read_text().splitlines()) > 300:
            assert "long because" in (ast.get_docstring(ast.parse(path.read_text())) or ""), path


@pytest.mark.parametrize("module", ["attnres_lit", "attnres_lit.ops", "attnres_lit.residual", "attnres_lit.model"])
def test_light_imports(module):
    check = f"import sys, {module}; print([m for m in ('lightning', 'litdata', 'jsonargparse') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
