"""`report` from folders with known numbers to its tables, its page and its files; mistakes get one line."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from attnres_lit.cli import main
from attnres_lit.experiments.report import study_of
from attnres_lit.experiments.scaling_sections import scaling
from experiments.run_folders import compute_of, ending_at, write_run, write_weights

CONFIGS = Path(__file__).parents[2] / "configs"
ENDS = {  # by variant: strategy, options, and the final losses of seeds 0, 1 and 2
    "PreNorm": ("PreNorm", {}, (1.50, 1.52, 1.51)),
    "Full": ("FullAttnRes", {}, (1.47, 1.50, 1.48)),
    "Block_S2": ("BlockAttnRes", {"block_size": 2}, (1.48, 1.50, 1.49)),
    "Block_N2": ("BlockAttnRes", {"num_blocks": 2}, (1.48, 1.50, 1.49)),
    "Block_S4": ("BlockAttnRes", {"block_size": 4}, (1.49, 1.50, 1.50)),
    "Block_N1": ("BlockAttnRes", {"num_blocks": 1}, (1.49, 1.50, 1.50)),
}
NOISE = 4.302653  # of Student's t with two degrees of freedom, 95%


def report(*args):
    main(["report", *map(str, args)])


def table(text, section):
    """The first table of a section of the Markdown, by the first cell of its rows; the head is "head"."""
    lines = text.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {"head": rows[0], **{row[0]: row for row in rows[2:]}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Runs at one size, and their report: its folder and its Markdown."""
    root = tmp_path_factory.mktemp("sweep")
    for name, (strategy, options, ends) in ENDS.items():
        for seed, loss in enumerate(ends):
            depth = {"depth/output_rms/0": 1.0, "depth/output_rms/1": 2.0 + seed, "depth/grad_norm/0": 1.0,
                     "depth/grad_norm/1": 3.0, "throughput/tokens_per_sec": 1024.0}  # fmt: skip
            folder = write_run(root, f"{name}-seed={seed}", strategy, options, seed, ending_at(loss, **depth))
            if name == "Full":
                even = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
                write_weights(folder, np.where(even > 0, even, np.nan))
    write_run(root, "mHC-seed=0", "MHC", rows=ending_at(1.4), max_steps=100)
    write_run(
        root,
        "mHC-seed=1",
        "MHC",
        seed=1,
        rows=[(20, {"val/loss": 3.0}), (30, {"val/loss": math.inf}), (40, {"val/loss": math.nan})],
    )
    report(root, "--out", root / "out")
    return root / "out", (root / "out/report.md").read_text()


def test_final_values(written):
    found = table(written[1], "Final val/loss")
    x = np.array([ends for *_, ends in ENDS.values()])
    noise = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    pooled = 2.228139 * ((noise**2).sum() / 10 * 2 / 3) ** 0.5  # t with (6 - 1) (3 - 1) degrees of freedom
    own = NOISE * np.std([-0.03, -0.02, -0.03], ddof=1) / 3**0.5
    assert found["head"][5] == "difference to PreNorm"
    mean, error, seeds, difference, alone, *paper = found["Full"][2:]
    assert (mean, error, seeds) == ("1.4833", "0.0088", "3")
    assert difference == f"-0.0267 ± {pooled:.4f}"
    assert alone == f"{own:.4f}"
    assert paper == ["Full AttnRes", "1.737", "-0.029"]
    assert found["PreNorm"][2:7] == ["1.5100", "0.0058", "3", "–", "–"]
    assert found["Block_S4"][7:] == ["Block, S = 4", "1.746", "-0.020"]
    assert found["Block_N1"][7:] == ["–", "–", "–"]
    assert "mHC" not in found


def test_what_is_not_finished_is_said(written):
    said = "In no table, since they are not finished: mHC-seed=0 (at step 40 of 100), mHC-seed=1 (diverged)."
    assert said in written[1]
    runs = table(written[1], "Runs")
    assert runs["mHC-seed=0"][1:4] == ["at step 40 of 100", "40", "5,120"]
    assert runs["Full-seed=1"][1:4] == ["finished", "40", "5,120"]
    assert runs["Full-seed=1"][5:] == ["1,024", "0.1"]


def test_block_sizes_and_numbers(written):
    sizes, counts = (table(written[1], name) for name in ("Block size", "Number of blocks"))
    assert [row[:3] for row in list(sizes.values())[1:]] == [
        ["1", "Full", "1.4833"],
        ["2", "Block_S2", "1.4900"],
        ["4", "Block_S4", "1.4967"],
    ]
    assert [row[4] for row in list(sizes.values())[1:]] == ["-0.029", "-0.020", "-0.020"]
    assert [row[1] for row in list(counts.values())[1:]] == ["Block_N1", "Block_N2", "Full"]
    assert counts["2"][4:6] == ["3", f"{3 * 16 * 4 / 1024:.2f}"]  # sources, and their KiB


def test_depth(written):
    along, reads = table(written[1], "Along depth"), table(written[1], "What each site reads")
    ratio = f"3 ± {1 / 3**0.5:.2g}"  # of 2, 3 and 4
    assert along["Full"][1:] == [ratio, ratio, f"{2**0.5 / 2:.3g} ± 0"]
    assert [cell.split(" ± ")[0] for cell in reads["Full"][1:]] == ["1"] * 3  # all sources alike


def test_sections_that_are_left_out_say_why(written):
    assert "Left out: scaling: a fit needs three or more sizes of model; PreNorm has 1." in written[1]
    assert "Left out: deep or wide: it takes models of two or more widths per layer" in written[1]


def test_the_page_needs_nothing_else(written):
    folder, markdown = written
    page = (folder / "index.html").read_text()
    assert not re.findall(r"https?:|href|<script|<link|url\(", page)
    sources = re.findall(r'src="([^"]{0,30})', page)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", markdown)
    assert len(pictures) == len(sources) == 7
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / name).with_suffix(".svg").read_text()
    for cell in ("1.4833", "Full, input-dependent query"):
        assert (cell in page) == (cell in markdown)
    commands = re.findall("^Made by `attnres_lit report .*--out .*`.$", markdown, re.MULTILINE)
    assert len(commands) == markdown.count("\n## ") == 7


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """Three sizes whose losses are power laws of what they cost."""
    root = tmp_path_factory.mktemp("ladder")
    for dim in (16, 32, 64):
        for name, strategy, coefficient in (("PreNorm", "PreNorm", 1.0), ("Block", "BlockAttnRes", 0.95)):
            for seed, noise in enumerate((0.999, 1.001)):
                loss = coefficient * noise * compute_of({"dim": dim}) ** -0.05
                folder = f"{name}-D{dim}-seed={seed}"
                write_run(root, folder, strategy, {}, seed, ending_at(loss), {"dim": dim})
    return root


def test_scaling(ladder, capsys):
    report(ladder)
    text = (ladder / "report/report.md").read_text()
    fits = table(text, "Scaling")
    assert fits["PreNorm"][1:4:2] == ["1.0000", "0.0500"]
    assert fits["Block"][1:4:2] == ["0.9500", "0.0500"]
    assert float(fits["Block"][5]) == pytest.approx((1 / 0.95) ** (1 / 0.05), abs=0.01)
    low, high = map(float, fits["Block"][6].split(" to "))
    assert low <= float(fits["Block"][5]) <= high
    assert fits["Block"][7] == "1.870, 0.058"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(ladder / "report/index.html")


@pytest.mark.parametrize(("at_loss", "outside"), [(1.0, True), (None, False)])
def test_a_loss_that_no_run_reached_is_extrapolated(ladder, at_loss, outside):
    parts = scaling(study_of([ladder], "val/loss", None, at_loss)).parts
    text = " ".join(part for part in parts if isinstance(part, str))
    assert ("to reach a val/loss of 1.0000" in text) == ("extrapolated" in text) == outside


def test_deep_or_wide(tmp_path):
    shapes = {(2, 2): 1.9, (2, 4): 1.8, (4, 4): 1.7, (4, 8): 1.6}  # layers and heads, at one compute
    for (layers, heads), loss in shapes.items():
        sizes = {"dim": 32, "num_layers": layers, "num_heads": heads, "hidden_dim": 1056 if layers == 2 else 448}
        for name, strategy, gain in (("PreNorm", "PreNorm", 0.0), ("Block", "BlockAttnRes", 0.05 + loss / 100)):
            folder = f"{name}-L{layers}_H{heads}"
            write_run(tmp_path, folder, strategy, rows=ending_at(loss - gain), sizes=sizes)
    report(tmp_path)
    text = (tmp_path / "report/report.md").read_text()
    found = table(text, "Deep or wide")
    assert found["PreNorm"] == ["PreNorm", "1.6000", "8", "2"]
    assert found["Block"] == ["Block", "1.5340", "8", "2"]
    assert "Left out: scaling: " in text


def test_any_metric_and_no_baseline(tmp_path):
    for name in ("one", "two"):
        rows = [(10 * i, {"train/loss": 2.0 - i / 10 + (name == "two")}) for i in range(1, 5)]
        write_run(tmp_path, name, "FullAttnRes", rows=rows)
    report(tmp_path / "two", tmp_path / "one", "--metric", "train/loss", "--out", tmp_path / "out")
    found = table((tmp_path / "out/report.md").read_text(), "Final train/loss")
    assert found["head"][5] == "difference to two"
    assert found["one"][2:6] == ["1.6000", "–", "1", "-1.0000"]
    assert len(found["head"]) == 7  # nothing of the paper, which has another metric


def fails(capsys, *args):
    """The line that it says."""
    with pytest.raises(SystemExit) as exit:
        report(*args)
    error = capsys.readouterr().err
    assert (exit.value.code, error.count("\n")) == (2, 1)
    return error.removeprefix("error: ").strip()


def test_mistakes_get_one_line(tmp_path, capsys):
    write_run(tmp_path / "runs", "PreNorm", rows=ending_at(2.0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    runs = tmp_path / "runs"
    assert fails(capsys, tmp_path / "nowhere") == f"there is no folder {tmp_path}/nowhere"
    empty = f"{tmp_path}/empty holds no run: no csv/version_*/metrics.csv below it"
    assert fails(capsys, runs, tmp_path / "empty") == empty
    assert fails(capsys, runs, "--baseline", "prenrom") == (
        "--baseline prenrom: there is PreNorm; did you mean PreNorm?"
    )
    assert fails(capsys, runs, "--metric", "val/los") == (
        "--metric val/los: no run logged it; there is val/loss; did you mean val/loss?"
    )
    assert fails(capsys, runs, "--out", tmp_path / "file").startswith(f"--out {tmp_path}/file cannot be written: ")
    assert fails(capsys, runs, "--at_loss", "0") == "--at_loss 0.0 must be above 0"
    assert not (runs / "report").exists()


def test_a_run_as_fit_leaves_it(workdir, capsys):
    sizes = ["--model.config.dim=16", "--model.config.num_layers=2", "--model.config.num_heads=2"]
    data = ["--data.corpus=TextFiles", "--data.corpus.paths=corpus", "--data.seq_len=16", "--data.val_fraction=0.4"]
    length = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    config = str(CONFIGS / "block.yaml")
    main(["fit", "--config", config, *sizes, *data, *length, "--data.batch_size=2", "--seed_everything=3"])
    report("runs")
    text = (workdir / "runs/report/report.md").read_text()
    assert table(text, "Runs")["BlockAttnRes"][1:4] == ["finished", "4", "128"]
    assert table(text, "Runs")["BlockAttnRes"][4] != "–"  # FLOPs, so the config is understood
    assert "BlockAttnRes" in table(text, "What each site reads")
    assert "BlockAttnRes" in table(text, "Along depth")
