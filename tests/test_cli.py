"""The command line as a user types it: runs, resumes, swaps, and mistakes."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from attnres_lit.cli import CLI, main
from attnres_lit.parallel.checkpoint import write
from attnres_lit.runs import claim
from attnres_lit.training import LanguageModel

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TINY = [
    "--data.corpus=TextFiles",
    "--data.corpus.paths=[corpus/*.txt]",
    "--data.val_fraction=0.3",
    "--data.seq_len=16",
    "--data.batch_size=4",
    "--model.config.dim=16",
    "--model.config.num_layers=3",
    "--model.config.num_heads=2",
    "--trainer.limit_val_batches=3",
    "--trainer.log_every_n_steps=1",
]


pytestmark = pytest.mark.usefixtures("workdir")


def run(subcommand, config="block", *flags):
    main([subcommand, "--config", str(CONFIGS / f"{config}.yaml"), *TINY, *flags])


def fails(capfd, *args):
    """Exit code 2 and one line of error, which is returned."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(list(args))
    assert exit.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def csv_rows(folder, version=0):
    with open(Path(folder) / f"csv/version_{version}/metrics.csv") as file:
        return list(csv.DictReader(file))


def losses(folder, version=0):
    return {int(row["step"]): row["train/loss"] for row in csv_rows(folder, version) if row["train/loss"]}


def test_a_run_leaves_its_folder(workdir):
    run("fit", "block", "--trainer.max_steps=3", "--trainer.val_check_interval=2")
    folder = workdir / "runs/BlockAttnRes"
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert (folder / "config.yaml").is_file()
    assert len(losses(folder)) == 3
    log = EventAccumulator(str(folder), {"images": 0})
    log.Reload()
    scalars, images = set(log.Tags()["scalars"]), set(log.Tags()["images"])
    named = {"train/loss", "val/loss", "val/bpb", "val/ppl", "lr", "grad_norm", "throughput/tokens_per_sec"}
    depth = {f"depth/{kind}/{layer}" for kind in ("output_rms", "grad_norm") for layer in range(3)}
    assert named | depth <= scalars
    assert images == {"depth/weights"}
    assert [event.step for event in log.Scalars("train/loss")] == [0, 1, 2]
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 3
    assert last["hyper_parameters"]["residual"]["class_path"] == "attnres_lit.BlockAttnRes"
    assert last["hyper_parameters"]["config"]["vocab_size"] == 257


def test_nothing_needless_is_said(workdir):
    args = ["fit", "--config", str(CONFIGS / "block.yaml"), *TINY, "--trainer.max_steps=1"]
    done = subprocess.run([sys.executable, "-m", "attnres_lit", *args], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).replace("\r", "\n").splitlines()
    expected = (
        "depth attention runs eager",  # without the extra `fast`, once
        "GPU available",
        "TPU available",
        "`Trainer.fit` stopped",
        "Seed set",
        "Epoch",
        "Training",
        "Validation",
    )
    summary = re.compile(r"\s+\| Name|-+$|\d+ \| model|[\d.]+ ?K?\s+(Total|Trainable|Non|Modules)|tokenizing")
    said = [line for line in lines if line.strip(" \x1b[A") and not line.startswith(expected)]
    assert [line for line in said if not summary.match(line)] == []


def test_a_second_run_moves_the_first_aside(workdir):
    run("fit", "prenorm", "--trainer.max_steps=1")
    run("fit", "prenorm", "--trainer.max_steps=2")
    assert list(losses(workdir / "runs/PreNorm.1")) == [0]
    assert list(losses(workdir / "runs/PreNorm")) == [0, 1]


@pytest.mark.parametrize("config", ["block", "mhc"])
def test_resume_is_bit_for_bit(workdir, config):
    """Losses and weights of 6 steps = 3 steps, a new process's worth of objects, 3 steps; validation in between."""
    every = ["--trainer.val_check_interval=2"]
    run("fit", config, "--name=whole", "--trainer.max_steps=6", *every)
    run("fit", config, "--name=parts", "--trainer.max_steps=3", *every)
    run("fit", config, "--name=parts", "--trainer.max_steps=6", *every, "--ckpt_path=last")
    whole = losses(workdir / "runs/whole")
    parts = losses(workdir / "runs/parts") | losses(workdir / "runs/parts", 1)
    assert whole == parts
    assert len(whole) == 6
    weights = [torch.load(f"runs/{n}/checkpoints/last.ckpt", weights_only=True) for n in ("whole", "parts")]
    assert all(torch.equal(a, weights[1]["state_dict"][name]) for name, a in weights[0]["state_dict"].items())


def test_layers_of_unequal_width(capfd):
    run("fit", "block", "--model.config.hidden_dim=[16,80,24]", "--trainer.max_steps=2")
    last = ["--trainer.max_steps=3", "--ckpt_path=last"]
    run("fit", "block", "--model.config.hidden_dim=[16,80,24]", *last)
    assert list(losses("runs/BlockAttnRes", 1)) == [2]
    again = torch.load("runs/BlockAttnRes/checkpoints/last.ckpt", weights_only=True)
    assert again["hyper_parameters"]["config"]["hidden_dim"] == [16, 80, 24]
    assert again["state_dict"]["model.sublayers.3.mixer.up_proj.weight"].shape == (80, 16)
    config = ["fit", "--config", str(CONFIGS / "block.yaml"), *TINY]
    refused = fails(capfd, *config, "--model.config.hidden_dim=[80,16,24]", *last)
    assert "hidden_dim=[16, 80, 24], this run asks for [80, 16, 24]: make them equal" in refused
    assert "has 2 widths: give one for each of num_layers=3" in fails(
        capfd, *config, "--model.config.hidden_dim=[16,80]"
    )


def test_killed_at_any_moment_and_resumed_is_bit_for_bit(workdir):
    """SIGKILL in the middle of a run in another process; what `last` holds continues to the very same end."""
    flags = [*TINY, "--trainer.val_check_interval=50", "--trainer.limit_val_batches=1", "--trainer.max_steps=60"]
    flags += ["--trainer.callbacks+=attnres_lit.training.callbacks.LastCheckpoint"]
    flags += ["--trainer.callbacks.dirpath={run}/checkpoints", "--trainer.callbacks.every_n_steps=5"]
    config = str(CONFIGS / "block.yaml")
    main(["fit", "--config", config, *flags, "--name=whole"])
    command = [sys.executable, "-m", "attnres_lit", "fit", "--config", config, *flags, "--name=killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last = workdir / "runs/killed/checkpoints/last.ckpt"
    deadline = time.monotonic() + 120
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert torch.load(last, weights_only=True)["global_step"] < 60
    main(["fit", "--config", config, *flags, "--name=killed", "--ckpt_path=last"])
    whole, resumed = losses("runs/whole"), losses("runs/killed", 1)
    assert resumed.items() <= whole.items()
    assert max(resumed) == 59


def test_validate_scores_the_run(workdir, capfd):
    run("fit", "block", "--trainer.max_steps=4", "--trainer.val_check_interval=4")
    trained = next(row["val/loss"] for row in csv_rows("runs/BlockAttnRes") if row["val/loss"])
    capfd.readouterr()
    run("validate", "block", "--ckpt_path=last")
    printed = re.search(r"val/loss\s*│?\s*([\d.]+)", capfd.readouterr().out)
    assert printed
    assert float(printed[1]) == pytest.approx(float(trained), rel=1e-6)
    run("test", "block", "--ckpt_path=best", "--trainer.limit_test_batches=2")
    run("predict", "block", "--ckpt_path=last", "--trainer.limit_predict_batches=2")
    assert torch.load("runs/BlockAttnRes/predictions.pt", weights_only=True).shape == (8, 16)


def test_warm_start_takes_the_weights_only(workdir):
    run("fit", "prenorm", "--trainer.max_steps=2", "--name=first")
    run("fit", "block", "--trainer.max_steps=1", "--name=second", "--model.init_from=runs/first/checkpoints/last.ckpt")
    assert float(losses("runs/second")[0]) < float(losses("runs/first")[0])
    assert torch.load("runs/second/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        (["block"], "BlockAttnRes"),
        (["block", "--model.residual=FullAttnRes"], "FullAttnRes"),
        (["block", "--model.residual=BlockAttnRes", "--model.residual.num_blocks=4"], "BlockAttnRes"),
        (["prenorm", "--model.residual", str(CONFIGS / "residual/mhc.yaml")], "MHC"),
        (["mhc", "--model.residual=attnres_lit.DenseFormer", "--model.residual.dilation=2"], "DenseFormer"),
    ],
)
def test_a_flag_swaps_the_residual(flags, strategy, capsys):
    with pytest.raises(SystemExit) as exit:
        run("fit", *flags, "--print_config")
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"class_path: attnres_lit.{strategy}" in printed
    assert ("num_blocks: 4" in printed) == ("--model.residual.num_blocks=4" in flags)


def test_a_run_is_named_after_its_residual(workdir):
    run("fit", "block", "--model.residual.num_blocks=4", "--trainer.max_steps=1")
    assert [p.name for p in (workdir / "runs").iterdir()] == ["BlockAttnRes-num_blocks=4"]


BLOCK = str(CONFIGS / "block.yaml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "--config", "nope.yaml"], r"nope\.yaml"),
        (["fit", "--config", BLOCK, "--trainer.max_step=3"], r"--trainer.max_step=3; did you mean trainer.max_steps\?"),
        (["fit", "--config", BLOCK, "--model.config.dim=wide"], "wide"),
        (["fit", "--config", BLOCK, "--model.config.dim=30"], "dim=30 must be an even multiple of num_heads=4"),
        (
            ["fit", "--config", BLOCK, "--model.residual=BlockAtnRes"],
            r"known are .*PreNorm.*; did you mean BlockAttnRes\?",
        ),
        (["fit", "--config", BLOCK, "--model.residual.num_blockz=2"], "num_blockz.*known are num_blocks, block_size"),
        (["fit", "--config", BLOCK, "--model.residual.num_blocks=99"], "num_blocks=99 must be between 1 and"),
        (["fit", "--config", BLOCK, "--data.tokenizer=BPE"], "unknown data.tokenizer 'BPE': known are BPETokenizer"),
        (["fit", "--config", BLOCK, "--data.corpus=TextFiles", "--data.corpus.paths=[none/*.txt]"], "none/"),
        (["fit", "--config", BLOCK, *TINY, "--data.batch_size=100000"], "fewer than one batch"),
        (["fit", "--config", BLOCK, "--ckpt_path=last"], "there is no runs/BlockAttnRes/checkpoints/last.ckpt"),
        (["validate", "--config", BLOCK, "--ckpt_path=last"], "there is no runs/BlockAttnRes/checkpoints/last.ckpt"),
        (["validate", "--config", BLOCK, "--ckpt_path=a.ckpt"], "there is no a.ckpt"),
        (["fit", "--config", BLOCK, "--model.init_from=a.ckpt"], "--model.init_from: there is no a.ckpt"),
        (["fit", "--config", BLOCK, "--data.seq_len=2048"], "data.seq_len=2048 exceeds model.config.max_seq_len=1024"),
        (["fit", "--config", BLOCK, "--data.seed=99999999999"], r"seed is 99999999999: it must be below 2\*\*32"),
        (["fit", "--config", BLOCK, "--data.split_seed=-1"], "split_seed is -1: it must be at least 0"),
        (["fit", "--config", BLOCK, "--seed_everything=-1"], "-1 is not in bounds"),
        (["fit", "--config", BLOCK, "--num_threads=0"], "num_threads.*v>0"),
        (["fit", "--config", BLOCK, "--name=.."], r"name is '\.\.': a run lives below runs_dir"),
        (["fit", "--config", BLOCK, "--name=."], r"name is '\.': a run lives below runs_dir"),
        (["fit", "--config", BLOCK, "--name=/tmp/x"], "name is '/tmp/x': a run lives below runs_dir"),
        (["fit", "--config", BLOCK, "--ckpt_path="], "is not a checkpoint"),
        (["fit", "--config", BLOCK, "--model.residual=Residual"], "Residual cannot be built: it does not define exit"),
        (["fit", "--config", BLOCK, "--trainer.val_check_interval=0"], "val_check_interval is 0: it must be above 0"),
        (["fit", "--config", BLOCK, "--trainer.accumulate_grad_batches=0"], "accumulate_grad_batches is 0: it must be"),
        (
            ["fit", "--config", BLOCK, "--trainer.gradient_clip_val=-1"],
            r"gradient_clip_val is -1(\.0)?: it must be at least",
        ),
        (["fit", "--config", BLOCK, *TINY, "--trainer.max_steps=-2"], "max_steps.*You passed in -2"),
        (["fit", "--config", BLOCK, *TINY, "--trainer.strategy=no"], "invalid strategy name: `strategy='no'`"),
        (
            ["fit", "--config", BLOCK, "--data.tokenizer=BPETokenizer", "--data.tokenizer.vocab_size=9"],
            "vocab_size is 9",
        ),
        (["fit", "--config", BLOCK, "--data.corpus=TextFiles", "--data.corpus.paths=[]"], "error: paths is empty"),
        (["fit"], "start from one, for example --config configs/block.yaml"),
        (["fit", "--config", BLOCK, "--model.residual=mhc"], r"unknown model.residual 'mhc'.*did you mean MHC\?"),
        (["fit", "--config", BLOCK, "--model.residual", "configs/mch.yaml"], "there is no file configs/mch.yaml"),
        (["fitt"], "invalid choice: 'fitt'"),
        ([], "subcommand"),
    ],
)
def test_a_mistake_gets_one_line(capfd, args, message, workdir):
    assert re.search(message, fails(capfd, *args))
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: 3", "a config sets model as a whole"),
        ("model: null", "a config sets model as a whole"),
        ("trainer: 3", "a config sets trainer as a whole"),
        ("model:\n  config: 3", "a config sets model.config as a whole"),
        ("model:\n  optim:", "a config sets model.optim as a whole"),
        ("model:\n  residual: null", "model.residual is None"),
        ("model:\n  residual:\n    class_path: Nope", "unknown model.residual 'Nope': known are BlockAttnRes"),
        ("data:\n  corpus:\n    class_path: TextFile", "unknown data.corpus 'TextFile': .*did you mean TextFiles"),
        ("trainer:\n  callbacks:\n    - class_path: Nope", "unknown class 'Nope' in trainer.callbacks"),
        ("runs_dir: null", "runs_dir is None"),
    ],
)
def test_a_mistake_in_a_file_gets_one_line(capfd, text, message, workdir):
    Path("mistake.yaml").write_text(text + "\n")
    assert re.search(message, fails(capfd, "fit", "--config", BLOCK, "--config", "mistake.yaml"))
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize("text", ["class_path: Nope\n", "garbage\n", ""])
def test_a_residual_file_that_names_no_strategy(capfd, text):
    Path("mine.yaml").write_text(text)
    line = fails(capfd, "fit", "--config", BLOCK, "--model.residual=mine.yaml")
    assert "mine.yaml does not say which model.residual" in line
    assert "BlockAttnRes" in line


@pytest.mark.parametrize(
    ("flag", "callback"),
    [
        ("enable_progress_bar", "ProgressBar"),
        ("enable_checkpointing", "LastCheckpoint"),
        ("enable_model_summary", "ModelSummary"),
    ],
)
def test_a_flag_turns_off_the_callback_of_its_kind(flag, callback, monkeypatch):
    trainers = []
    monkeypatch.setattr(CLI, "_run_subcommand", lambda self, subcommand: trainers.append(self.trainer))
    for value in ("true", "false"):
        run("fit", "block", f"--trainer.{flag}={value}")
    on, off = ([type(each).__name__ for each in trainer.callbacks] for trainer in trainers)
    assert callback in on
    assert callback not in off
    assert "DepthWeights" in off


def test_a_run_repeats_from_its_own_config_under_another_name(workdir):
    run("fit", "prenorm", "--trainer.max_steps=2", "--name=first")
    before = {path: path.stat().st_mtime_ns for path in (workdir / "runs/first").rglob("*")}
    main(["fit", "--config", "runs/first/config.yaml", "--name=second"])
    assert losses("runs/first") == losses("runs/second")
    assert {path: path.stat().st_mtime_ns for path in (workdir / "runs/first").rglob("*")} == before


def test_only_training_writes_into_a_run(workdir, capfd):
    """A refused resume and a validation leave the files of a run, its config among them."""
    run("fit", "prenorm", "--trainer.max_steps=1")
    before = {path: path.stat().st_mtime_ns for path in (workdir / "runs").rglob("*")}
    fails(capfd, "fit", "--config", BLOCK, *TINY, "--ckpt_path=last", "--name=PreNorm")
    fails(capfd, "fit", "--config", BLOCK, *TINY, "--model.init_from=runs/PreNorm/checkpoints/last.ckpt",
          "--model.config.dim=32", "--name=PreNorm")  # fmt: skip
    run("validate", "prenorm", "--ckpt_path=last")
    run("validate", "prenorm", "--name=none")
    assert {path: path.stat().st_mtime_ns for path in (workdir / "runs").rglob("*")} == before


@pytest.mark.parametrize("content", [{"a": 1}, torch.ones(2), {"state_dict": {}}])
def test_a_file_of_torch_that_is_no_checkpoint(content, capfd):
    torch.save(content, "other.pt")
    for flag in ("--ckpt_path", "--model.init_from"):
        assert "other.pt is not a checkpoint" in fails(capfd, "fit", "--config", BLOCK, *TINY, f"{flag}=other.pt")


def test_weights_alone_do_not_resume(workdir, capfd):
    run("fit", "prenorm", "--trainer.max_steps=1", "--name=whole")
    checkpoint = torch.load("runs/whole/checkpoints/last.ckpt", weights_only=True)
    torch.save({key: value for key, value in checkpoint.items() if key != "optimizer_states"}, "weights.ckpt")
    line = fails(capfd, "fit", "--config", str(CONFIGS / "prenorm.yaml"), *TINY, "--ckpt_path=weights.ckpt")
    assert "weights alone" in line


def test_overfit_as_its_comment_says(workdir):
    run("fit", "block", "--config", str(CONFIGS / "debug/overfit.yaml"), "--trainer.max_steps=3")
    assert len(losses("runs/overfit")) == 3


def test_a_damaged_checkpoint_is_refused(workdir, capfd):
    run("fit", "block", "--trainer.max_steps=1")
    path = workdir / "runs/BlockAttnRes/checkpoints/last.ckpt"
    path.write_bytes(path.read_bytes()[:5000])
    assert "damaged" in fails(capfd, "fit", "--config", BLOCK, *TINY, "--ckpt_path=last")


def test_another_architecture_cannot_resume(workdir, capfd):
    run("fit", "block", "--trainer.max_steps=1")
    flags = [*TINY, "--ckpt_path=runs/BlockAttnRes/checkpoints/last.ckpt", "--trainer.max_steps=2"]
    line = fails(capfd, "fit", "--config", BLOCK, *flags, "--model.residual.num_blocks=2", "--model.config.dim=32")
    assert "model.residual.num_blocks=None, this run asks for 2" in line
    assert "model.config.dim=16, this run asks for 32" in line
    line = fails(capfd, "fit", "--config", str(CONFIGS / "full.yaml"), *flags)
    assert "BlockAttnRes" in line
    assert "FullAttnRes" in line
    run("fit", "block", "--trainer.max_steps=2", "--ckpt_path=last", "--model.optim.lr=1e-4")
    assert float(csv_rows("runs/BlockAttnRes", 1)[-1]["lr"] or 0) <= 1e-4


def test_the_schedule_does_not_depend_on_max_steps(workdir):
    for steps in (2, 4):
        run("fit", "prenorm", f"--trainer.max_steps={steps}", f"--name={steps}")
    rates = [[row["lr"] for row in csv_rows(f"runs/{steps}") if row["lr"]][:2] for steps in (2, 4)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_top_level_config_trains(path, workdir):
    run("fit", path.stem, "--config", str(CONFIGS / "debug/fast_dev_run.yaml"))
    assert not (workdir / "runs").exists()


PIECES = [
    path for path in sorted(CONFIGS.glob("*/*.yaml")) if "axes" not in yaml.safe_load(path.read_text())
]  # no sweep


@pytest.mark.parametrize("path", PIECES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_piece_parses(path, capsys):
    flag = {"residual": "--model.residual", "model": "--model.config", "optim": "--model.optim"}
    flag |= {"trainer": "--trainer", "data": "--data"}
    with pytest.raises(SystemExit) as exit:
        run("fit", "block", flag.get(path.parent.name, "--config"), str(path), "--print_config")
    assert exit.value.code == 0


def test_top_level_configs_differ_in_the_residual_only():
    bodies = {p.stem: p.read_text().splitlines()[1:] for p in CONFIGS.glob("*.yaml")}
    for name, lines in bodies.items():
        others = [line.replace(f"residual/{name}.yaml", "residual/block.yaml") for line in lines]
        assert others == bodies["block"]
    assert set(bodies) == {"block", "full", "prenorm", "denseformer", "mhc"}


def test_version_and_help(capsys):
    for args, expected in ((["--version"], "attnres_lit 0."), (["fit", "--help"], "--model.residual")):
        with pytest.raises(SystemExit) as exit:
            main(args)
        assert exit.value.code == 0
        assert expected in capsys.readouterr().out


def test_two_runs_of_one_name_at_once_do_not_meet(workdir, capfd):
    """The second one that would write into a folder is refused, fresh or resumed, and the first is not touched."""
    run("fit", "block", "--trainer.max_steps=1", "--name=mine")
    held = claim(workdir / "runs/mine")
    for flags in ([], ["--ckpt_path=last"]):
        line = fails(capfd, "fit", "--config", BLOCK, *TINY, "--name=mine", *flags)
        assert "a run that is going on: choose another --name" in line
    held.release()
    run("fit", "block", "--trainer.max_steps=2", "--name=mine", "--ckpt_path=last")


def as_folder(file, folder):
    """A checkpoint as processes that share a model write it, from that of one device."""
    checkpoint = torch.load(file, weights_only=True)
    module = LanguageModel.load_from_checkpoint(file)
    optimizer, _ = module.optim.build(module.model, fused=False)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    write(folder, module, [optimizer], checkpoint)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_shards_is_a_checkpoint_like_any_other(workdir, capfd):
    """Resumed bit for bit, validated, started from, consolidated; and resumed from what was consolidated."""
    run("fit", "block", "--name=whole", "--trainer.max_steps=4")
    run("fit", "block", "--name=parts", "--trainer.max_steps=2")
    shutil.copytree("runs/parts", "runs/sharded")
    for folder in ("folder.ckpt", "runs/sharded/checkpoints/last.ckpt"):
        as_folder("runs/parts/checkpoints/last.ckpt", folder)
    run("validate", "block", "--ckpt_path=folder.ckpt")
    run("fit", "block", "--name=new", "--trainer.max_steps=1", "--model.init_from=folder.ckpt")
    main(["consolidate", "runs/sharded/checkpoints/last.ckpt", "out/one.ckpt"])
    for name, ckpt in (("sharded", "last"), ("parts", "out/one.ckpt")):
        run("fit", "block", f"--name={name}", "--trainer.max_steps=4", f"--ckpt_path={ckpt}")
        assert losses(f"runs/{name}") | losses(f"runs/{name}", 1) == losses("runs/whole")
        assert Path(f"runs/{name}/checkpoints/last.ckpt").is_file()
    line = fails(capfd, "fit", "--config", BLOCK, *TINY, "--ckpt_path=folder.ckpt", "--model.config.dim=32")
    assert "model.config.dim=16, this run asks for 32" in line
    assert "is there already" in fails(capfd, "consolidate", "folder.ckpt", "out/one.ckpt")
    main(["consolidate", "folder.ckpt", "out/one.ckpt", "--overwrite"])
    next(Path("folder.ckpt").glob("*.distcp")).unlink()
    line = fails(capfd, "fit", "--config", BLOCK, *TINY, "--ckpt_path=folder.ckpt")
    assert re.search(r"--ckpt_path folder.ckpt: folder.ckpt is damaged: its __0_0.distcp is missing", line)
    assert "is missing" in fails(capfd, "consolidate", "folder.ckpt", "out/two.ckpt")
    assert [path.name for path in Path("out").iterdir()] == ["one.ckpt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.ckpt", "out.ckpt"], "there is no a.ckpt"),
        (["corpus", "out.ckpt"], "corpus is not a checkpoint, or it is damaged"),
        (["text.ckpt", "out.ckpt"], "text.ckpt is not a checkpoint, or it is damaged"),
        (["a.ckpt"], "the following arguments are required: out"),
        (["a.ckpt", "out.ckpt", "--overwrit"], r"unrecognized arguments: --overwrit; did you mean overwrite\?"),
    ],
)
def test_consolidate_refuses_in_one_line(capfd, args, message, workdir):
    Path("text.ckpt").write_text("a text")
    assert re.search(message, fails(capfd, "consolidate", *args))
    assert not Path("out.ckpt").exists()


def test_a_save_killed_between_two_names_is_found(workdir):
    """The old checkpoint has stepped aside, and the new one has not its name yet."""
    run("fit", "prenorm", "--trainer.max_steps=2")
    checkpoints = workdir / "runs/PreNorm/checkpoints"
    (checkpoints / "last.ckpt").rename(checkpoints / "last.ckpt.old")
    run("fit", "prenorm", "--trainer.max_steps=3", "--ckpt_path=last")
    assert [path.name for path in checkpoints.iterdir()] == ["last.ckpt"]
    assert list(losses("runs/PreNorm", 1)) == [2]
