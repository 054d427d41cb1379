import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from attnres_lit.data import shards
from attnres_lit.data.datamodule import TokenDataModule
from attnres_lit.data.tokenizers import BPETokenizer
from data.words import Words

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


def ready(tmp_path: Path, **options: Any) -> TokenDataModule:
    options = {"corpus": Words(), "root": str(tmp_path), "seq_len": 31, "batch_size": 4, "val_fraction": 0.2} | options
    datamodule = TokenDataModule(**options)
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def as_rank(datamodule: TokenDataModule, rank: int, size: int) -> TokenDataModule:
    """The data module as a strategy with `size` data-parallel ranks would see it."""
    sampler = {"num_replicas": size, "rank": rank}
    datamodule.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler, overfit_batches=0)  # pyrefly: ignore
    return datamodule


def rows(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in loader for row in batch]


def stored(datamodule: TokenDataModule, split: str) -> np.ndarray:
    """The tokens of a split of one chunk, as they lie in its file."""
    size = datamodule.meta.splits[split].tokens
    return np.frombuffer((datamodule.dir / split / "chunk-0-0.bin").read_bytes()[-2 * size :], dtype=np.uint16)


def test_batches_are_int64_blocks_of_the_corpus_in_order(tmp_path: Path):
    datamodule = ready(tmp_path)
    batches = list(datamodule.predict_dataloader())
    assert all(batch.shape == (4, 32) and batch.dtype == torch.int64 for batch in batches)
    tokens = stored(datamodule, "val")
    stream = torch.cat([batch.flatten() for batch in batches])
    np.testing.assert_array_equal(stream, tokens[: len(stream)])
    assert len(tokens) - len(stream) < 4 * 32  # less than one batch is lost
    text = datamodule.tokenizer.decode(stream[:40])
    assert text.startswith("document")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_validation_is_the_same_each_time_and_training_is_shuffled_anew(tmp_path: Path, workers: int):
    datamodule = ready(tmp_path, num_workers=workers)
    val = datamodule.val_dataloader()
    first = rows(val)
    assert first == rows(val) == rows(datamodule.test_dataloader())
    in_order = rows(datamodule.predict_dataloader())
    assert first != in_order
    assert len(set(first) & set(in_order)) > 0.9 * len(first)  # but for those an incomplete batch drops
    assert len(first) == 4 * len(val)
    train = datamodule.train_dataloader()
    one, two = rows(train), rows(train)
    assert len(one) == len(two) == 4 * len(train)
    assert one != two
    assert len(set(one) & set(two)) > 0.9 * len(set(one))  # the same blocks but for those an incomplete batch drops
    assert one == rows(datamodule.train_dataloader())


def test_blocks_mix_over_the_whole_chunk(tmp_path: Path):
    datamodule = ready(tmp_path, corpus=Words(2000))
    tokens = stored(datamodule, "train")
    blocks = tokens[: len(tokens) // 32 * 32].reshape(-1, 32)
    position = {tuple(block): i for i, block in enumerate(blocks.tolist())}
    spread = [np.ptp([position[tuple(row)] for row in batch.tolist()]) for batch in datamodule.train_dataloader()]
    assert np.mean(spread) > 0.5 * len(blocks)  # 0.6 expected of four; neighbours are few blocks apart


@pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")
def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_PIECE", 100)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 3000)
    datamodule = ready(tmp_path)
    here = rows(datamodule.train_dataloader())
    monkeypatch.setenv("LITDATA_POSIX_FAST", "1")  # as on a network file system
    assert rows(datamodule.train_dataloader()) == here


def test_seeds(tmp_path: Path):
    assert rows(ready(tmp_path).train_dataloader()) != rows(ready(tmp_path, seed=1).train_dataloader())
    assert rows(ready(tmp_path).val_dataloader()) == rows(ready(tmp_path, seed=1).val_dataloader())


def test_block_length_may_change_without_preparing_again(tmp_path: Path):
    assert ready(tmp_path).meta == ready(tmp_path, seq_len=63, batch_size=2).meta
    assert next(iter(ready(tmp_path, seq_len=63).train_dataloader())).shape == (4, 64)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_ranks_share_the_blocks_out(tmp_path: Path, workers: int, split: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_PIECE", 100)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 3000)  # several chunks, unlike the number of ranks
    parts = []
    for rank in range(3):
        datamodule = as_rank(ready(tmp_path, num_workers=workers), rank, 3)
        loader = datamodule.train_dataloader() if split == "train" else datamodule.val_dataloader()
        parts.append(rows(loader))
        assert len(parts[-1]) == 4 * len(loader)
    assert len({len(part) for part in parts}) == 1
    blocks = [row for part in parts for row in part]
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pipeline_of_two_stages_resumes_on_the_same_data(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")  # two processes, one data-parallel rank
    loader = as_rank(ready(tmp_path, num_workers=workers), 0, 1).train_dataloader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    assert len(rest) == len(loader) - 3
    resumed = as_rank(ready(tmp_path, num_workers=workers), 0, 1).train_dataloader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest


def test_resuming_with_other_data_is_refused_and_a_moved_folder_is_not(tmp_path: Path):
    loader = ready(tmp_path / "a").train_dataloader()
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), next(batches)
    moved = ready(tmp_path / "b").train_dataloader()
    moved.load_state_dict(state)
    assert torch.equal(next(iter(moved)), expected)
    for option, value, message in (
        ("seed", 7, "trained with seed 0, the data have 7"),
        ("seq_len", 63, "trained with seq_len 31, the data have 63"),
        ("corpus", Words(301), "trained with fingerprint"),
    ):
        other = ready(tmp_path / option, **{option: value}).train_dataloader()
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


def test_vocabulary(tmp_path: Path):
    datamodule = TokenDataModule(Words(), BPETokenizer(400), root=str(tmp_path), val_fraction=0.2)
    assert datamodule.vocab_size == 400  # before any preparation
    datamodule = ready(tmp_path, tokenizer=BPETokenizer(400))
    again = ready(tmp_path, tokenizer=BPETokenizer(400))
    assert datamodule.dir.name == "words-bpe400"
    assert torch.equal(datamodule.token_bytes, again.token_bytes)
    tokens = torch.cat([batch.flatten() for batch in again.val_dataloader()])
    text = datamodule.tokenizer.decode(tokens)
    assert datamodule.token_bytes[tokens].sum() == len(text.encode())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"seq_len": 0}, "seq_len is 0: it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1: it must be at least 0"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"split_seed": -1}, "split_seed is -1: it must be at least 0"),
        ({"seed": 2**32}, "seed is 4294967296: it must be below 2**32"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0: it must lie between 0 and 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenDataModule(Words(), **options)


def test_a_split_with_fewer_tokens_than_one_batch(tmp_path: Path):
    datamodule = ready(tmp_path, batch_size=200)
    assert len(datamodule.train_dataloader()) == 1
    with pytest.raises(ValueError, match=r"the val split of .* has \d+ tokens, fewer than one batch .* raise val_frac"):
        datamodule.val_dataloader()
    with pytest.raises(ValueError, match=r"for each of 5 ranks: .* use a larger corpus"):
        as_rank(datamodule, 0, 5).train_dataloader()


def test_setup_without_preparation_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match="words-bytes does not exist: prepare the corpus first"):
        TokenDataModule(Words(), root=str(tmp_path)).setup("fit")


CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs_build_and_show_every_option(config: Path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TokenDataModule, "data")
    default = vars(parser.get_defaults().data)
    parsed = parser.parse_args([f"--data={config}"])
    assert re.findall(r"^(\w+):", config.read_text(), re.MULTILINE) == list(default)
    datamodule = parser.instantiate_classes(parsed).data
    assert isinstance(datamodule, TokenDataModule)
    if config.stem == "python_stdlib":  # shows the defaults themselves
        plain = TokenDataModule()
        assert (datamodule.corpus.name, datamodule.tokenizer.name) == (plain.corpus.name, plain.tokenizer.name)
        assert default.items() <= (vars(parsed.data) | {"corpus": None, "tokenizer": None}).items()


def test_components_are_chosen_on_the_command_line(tmp_path: Path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TokenDataModule, "data")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    arguments = [
        "--data.corpus=TextFiles",
        f"--data.corpus.paths=[{tmp_path}/a.txt, {tmp_path}/*.txt]",
        "--data.corpus.one_document_per=line",
        "--data.tokenizer=BPETokenizer",
        "--data.tokenizer.vocab_size=512",
    ]
    datamodule = parser.instantiate_classes(parser.parse_args(arguments)).data
    assert list(datamodule.corpus.documents()) == ["one", "two"]
    assert datamodule.vocab_size == 512
