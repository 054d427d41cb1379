"""Checkpoints between layouts, saves that are killed, and what is refused."""

import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from attnres_lit.parallel.atomic import aside, located
from attnres_lit.parallel.checkpoint import (
    consolidate,
    describe,
    read_full,
    read_optimizers,
    read_weights,
    write,
    write_file,
)
from attnres_lit.parallel.sharded import ShardedCheckpoint
from attnres_lit.runs import find_checkpoint
from attnres_lit.training.checkpoint import misfits, warm_start
from parallel.layouts import SIZES, Whole, load, rest, save, spread, step
from parallel.world import RankFailed, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def union(parts):
    """What all processes hold; what several hold is the same."""
    whole = {}
    for part in parts:
        for key, value in part.items():
            assert same(whole.setdefault(key, value), value), key
    return whole


def same(a, b):
    return a.equal(b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert not [key for key in a if not same(a[key], b[key])]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each layout, and what the model and the optimizer are before and after the step that follows."""
    return write_all(tmp_path_factory.mktemp("checkpoints"), SIZES)


def write_all(folder, layouts, **options):
    values = []
    for layout in layouts:
        ranks = on_ranks(SIZES[layout], save, layout, folder / f"{layout}.ckpt", **options)
        values.append([union(each) for each in zip(*ranks, strict=True)])
    for before, after in values[1:]:  # the layouts agree to begin with
        assert_same(before, values[0][0])
        assert_same(after, values[0][1])
    return folder, values[0]


def test_one_device_writes_a_file_and_sharded_layouts_a_folder(written):
    folder, _ = written
    assert {path.name: path.is_file() for path in folder.iterdir()} == {
        f"{layout}.ckpt": layout == "one" for layout in SIZES
    }


@pytest.mark.parametrize("layout", SIZES)
def test_every_layout_loads_every_layout(layout, written):
    """Weights and optimizer bit for bit, and the step after them equals that of the run that went on."""
    folder, expected = written
    ranks = on_ranks(SIZES[layout], load, layout, [folder / f"{each}.ckpt" for each in SIZES])
    for results in zip(*ranks, strict=True):
        for found, values in zip(zip(*results, strict=True), expected, strict=True):
            assert_same(union(found), values)


def test_muon_steps_alike_in_every_layout_and_continues_in_any(tmp_path):
    """Bit for bit: a sharded matrix is orthogonalised as a whole."""
    layouts = ("one", "fsdp", "hybrid")
    folder, expected = write_all(tmp_path, layouts, muon=True)
    for layout in ("one", "fsdp"):
        ranks = on_ranks(SIZES[layout], load, layout, [folder / f"{each}.ckpt" for each in layouts], muon=True)
        for results in zip(*ranks, strict=True):
            for found, values in zip(zip(*results, strict=True), expected, strict=True):
                assert_same(union(found), values)


STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at(number, action, *args):
    """Run in another process that is killed just before that step on the file system. Returns whether it got there."""
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0
        return os.WIFSIGNALED(status)
    seen = 0

    def count(event, arguments):
        nonlocal seen
        if event in STEPS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        action(*args)
        os._exit(0)
    finally:
        os._exit(1)


def save_file(path, model, optimizers, rest):
    write_file(path, rest | {"state_dict": model.state_dict(), "optimizer_states": []})


@pytest.mark.parametrize("new", [write, save_file])
@pytest.mark.parametrize("old", [write, save_file])
def test_a_save_killed_at_any_step_leaves_a_checkpoint(old, new, tmp_path):
    """The old one or the new one, whole, wherever the save was killed; and the next save clears what it left."""
    path, number, killed, left = tmp_path / "checkpoints/last.ckpt", 0, True, set()
    model = torch.nn.Linear(2, 2)
    weights = [{name: value + steps for name, value in model.state_dict().items()} for steps in (0, 1)]

    def at(save, steps):
        model.load_state_dict(weights[steps])
        save(path, model, [], rest(steps))

    while killed:
        number += 1
        shutil.rmtree(path.parent, ignore_errors=True)
        at(old, 0)
        model.load_state_dict(weights[1])
        killed = kill_at(number, new, path, model, [], rest(1))
        left |= {each.name for each in path.parent.iterdir()}
        found = read_full(find_checkpoint(tmp_path, "last"))
        assert_same(found["state_dict"], weights[found["global_step"]])
        at(new, 1)
        assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]
        assert read_full(path)["global_step"] == 1
    assert number > 3
    assert ("last.ckpt.old" in left) == (write in (old, new))


def die_while_writing(path):
    if torch.distributed.get_rank() == 1:
        sys.addaudithook(lambda event, args: event == "open" and "__1_0" in str(args[0]) and os._exit(9))
    save("pipeline", path, steps=4)


def test_a_process_killed_while_all_write_leaves_the_old_checkpoint(tmp_path, written):
    path = tmp_path / "last.ckpt"
    shutil.copytree(written[0] / "pipeline.ckpt", path)
    with pytest.raises(RankFailed, match="rank 1 of 2 died with exit code 9"):
        on_ranks(2, die_while_writing, path)
    assert read_full(path)["global_step"] == 3


def write_nowhere(path):
    with pytest.raises(OSError, match="a file") as error:
        save("pipeline", path / "a file" / "last.ckpt")
    return str(error.value)


def test_what_the_first_process_cannot_write_stops_all(tmp_path):
    (tmp_path / "a file").write_text("")
    assert len(set(on_ranks(2, write_nowhere, tmp_path))) == 1


class Boom:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def folder(written, tmp_path):
    """A checkpoint of two processes, to be spoilt."""
    return Path(shutil.copytree(written[0] / "pipeline.ckpt", tmp_path / "spoilt.ckpt"))


@pytest.mark.parametrize("place", [".metadata", "meta.pt", "__0_0.distcp", ""])
@pytest.mark.parametrize("dump", ["pickle", "torch"])
def test_nothing_that_is_loaded_runs(place, dump, folder, tmp_path):
    path = folder / place
    if not place:
        shutil.rmtree(folder)
    boom, size = Boom(tmp_path / "ran"), path.stat().st_size if path.is_file() else 0
    if dump == "torch":
        with open(path, "wb") as file:
            torch.save({"state_dict": {}, "pytorch-lightning_version": boom}, file)
    else:
        path.write_bytes(pickle.dumps(boom, 2))
    if path.stat().st_size < size:
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))  # as long as it was
    model = Whole()
    for action in (read_full, describe, lambda folder: read_weights(folder, model.state_dict())):
        if place == "__0_0.distcp" and action is describe:
            continue  # which does not read it
        with pytest.raises(ValueError, match=r"is damaged|is not a checkpoint"):
            action(folder)
    assert not (tmp_path / "ran").exists()


def test_an_index_cannot_point_out_of_the_folder(folder):
    index = (folder / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in index
    (folder / ".metadata").write_bytes(index.replace(name, b"../../../etc"))
    with pytest.raises(ValueError, match="is no index"):
        describe(folder)


def spoil(folder, how):
    shard = folder / "__1_0.distcp"
    data = shard.read_bytes()
    if how == "missing":
        shard.unlink()
    elif how == "cut":
        shard.write_bytes(data[:-1])
    elif how == "overwritten":
        shard.write_bytes(b"\0" * len(data))
    else:
        (folder / how).unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"spoilt.ckpt is damaged: its __1_0.distcp is missing or cut off"),
        ("cut", r"spoilt.ckpt is damaged: its __1_0.distcp is missing or cut off"),
        ("overwritten", r"spoilt.ckpt is damaged: a shard of it cannot be read"),
        ("meta.pt", r"spoilt.ckpt is not a checkpoint, or it is damaged$"),
        (".metadata", r"spoilt.ckpt is not a checkpoint, or it is damaged: its .metadata is no index"),
    ],
)
def test_a_damaged_folder_is_refused(how, message, folder):
    spoil(folder, how)
    with pytest.raises(ValueError, match=message) as error:
        read_full(folder)
    assert "\n" not in str(error.value)
    if how != "overwritten":  # known before a run is touched
        with pytest.raises(ValueError, match=message):
            describe(folder)


def load_and_tell(path):
    with pytest.raises(ValueError, match="is damaged") as error:
        load("pipeline", [path])
    return str(error.value)


def test_what_one_process_cannot_read_stops_all(folder):
    """The first of them reads the first shard alone, which is whole."""
    spoil(folder, "overwritten")
    assert len(set(on_ranks(2, load_and_tell, folder))) == 1


def test_weights_of_another_model_change_nothing(written, tmp_path):
    model = Whole()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = dict(model.state_dict())
    for name, value in (("model.more", torch.zeros(1)), ("model.norm.weight", torch.zeros(3))):
        with pytest.raises(ValueError, match=rf"does not fit: .*{name}"):
            read_weights(written[0] / "fsdp.ckpt", weights | {name: value})
    assert_same(before, dict(model.state_dict()))


def test_describe_reads_no_data(written):
    for layout in SIZES:
        found, whole = describe(written[0] / f"{layout}.ckpt"), read_full(written[0] / f"{layout}.ckpt")
        assert {k: v for k, v in found.items() if k in rest(3)} == rest(3)
        for name, value in whole["state_dict"].items():
            assert (found["state_dict"][name].shape, found["state_dict"][name].device.type) == (value.shape, "meta")
        assert found.keys() == whole.keys()
        assert torch.load(path, weights_only=True) if (path := written[0] / layout / "meta.pt").exists() else True


def moved(optimizer, model):
    """A model and this optimizer after two steps."""
    built = optimizer(model.parameters())
    for number in range(2):
        step(model, built, number)
    return built


class Counting(torch.optim.SGD):
    """Keeps a number, and a tensor of a shape of its own, for every parameter."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["row"] = parameter.detach().flatten()[:2].clone()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1),
        lambda parameters: Counting(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["sgd", "momentum", "muon", "counting"],
)
def test_any_optimizer(optimizer, tmp_path):
    """Whatever it keeps of a parameter, a folder brings back, into a fresh one."""
    model, fresh = Whole(), Whole()
    saved = moved(optimizer, model)
    write(tmp_path / "a.ckpt", model, [saved], rest(2))
    read_weights(tmp_path / "a.ckpt", fresh.state_dict())
    loaded = optimizer(fresh.parameters())
    read_optimizers(tmp_path / "a.ckpt", fresh, [loaded])
    for each in (0, 1):
        for a, b in zip(saved.param_groups[0]["params"], loaded.param_groups[0]["params"], strict=True):
            assert a.equal(b)
            assert_same(saved.state[a], loaded.state[b])
        if each == 0:
            step(model, saved, 2)
            step(fresh, loaded, 2)


def test_a_part_needs_names_in_a_file(written, tmp_path):
    """Files from before the state of the optimizer had names: a whole model takes it in its order."""
    checkpoint = read_full(written[0] / "one.ckpt")
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        del group["param_names"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    old, expected = on_ranks(2, load, "fsdp", [tmp_path / "old.ckpt", written[0] / "one.ckpt"])[0]
    assert_same(old[1], expected[1])
    with pytest.raises(RankFailed, match="the state of its optimizer has no names; resume it on one device"):
        on_ranks(2, load, "pipeline", [tmp_path / "old.ckpt"])


def test_weights_alone_do_not_load_an_optimizer(tmp_path):
    model = Whole()
    write(tmp_path / "a.ckpt", model, None, rest(0))
    assert "optimizer_states" not in describe(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="holds weights alone"):
        read_optimizers(tmp_path / "a.ckpt", model, [torch.optim.SGD(model.parameters())])


def test_consolidate(written, tmp_path):
    whole = read_full(written[0] / "one.ckpt")
    for layout in SIZES:
        consolidate(str(written[0] / f"{layout}.ckpt"), str(tmp_path / f"new/{layout}.ckpt"))
        found = torch.load(tmp_path / f"new/{layout}.ckpt", weights_only=True)
        assert_same(found["state_dict"], whole["state_dict"])
        assert found.keys() == whole.keys()
    out = str(tmp_path / "new/one.ckpt")
    with pytest.raises(ValueError, match="is there already: choose another name, or add --overwrite"):
        consolidate(out, out)
    consolidate(str(written[0] / "fsdp.ckpt"), out, overwrite=True)


def test_the_old_checkpoint_is_read_only_if_there_is_no_new_one(folder):
    shutil.copytree(folder, aside(folder))
    assert located(folder) == folder
    (folder / "meta.pt").unlink()
    assert located(folder) == aside(folder)
    shutil.rmtree(folder)
    assert describe(folder)["global_step"] == 3


class Fake(ShardedCheckpoint):
    """The checkpoints of a strategy, and nothing else of it."""

    def __init__(self, layout):
        self.lightning_module, optimizer = spread(layout)
        self.optimizers = [optimizer]

    def broadcast(self, path):
        return path


def compare_part(path):
    """What does not fit of a checkpoint and the part that this process has; as it is, and after edits of the model."""
    strategy, found = Fake("pipeline"), []
    model = strategy.lightning_module.model
    for edit in (
        lambda: None,
        lambda: model.sublayers.pop("3") if "3" in model.sublayers else None,
        lambda: model.residual.register_parameter("more", torch.nn.Parameter(torch.zeros(2))),
    ):
        edit()
        checkpoint = strategy.load_checkpoint(path)
        found.append(misfits(checkpoint["state_dict"], strategy.lightning_module.state_dict()))
    return found


def test_a_part_is_compared_with_a_whole(written):
    """A weight that no process has is unknown; one that the checkpoint does not have is missing."""
    for found in on_ranks(2, compare_part, written[0] / "fsdp.ckpt"):
        assert found[0] == ""
        assert found[1].startswith("model.sublayers.3.norm.weight, ")
        assert found[1].endswith(" unknown")
        assert found[2].startswith("model.residual.more missing; model.sublayers.3.")


def warm_start_part(path):
    """Returns the weights that this process has of another seed's model after a warm start."""
    model, _ = spread("pipeline")
    for value in model.state_dict().values():
        value.zero_()
    warm_start(model.model, str(path), {"config": {}, "residual": {"class_path": "a", "init_args": {}}})
    return dict(model.state_dict())


def test_a_part_starts_from_the_weights_of_a_whole(written):
    """Without hyper-parameters in the checkpoint, the residual starts fresh."""
    found, before = union(on_ranks(2, warm_start_part, written[0] / "fsdp.ckpt")), written[1][0]
    for name, value in found.items():
        assert same(value, torch.zeros_like(value) if ".residual." in name else before[name]), name
    assert found.keys() == Whole().state_dict().keys()
