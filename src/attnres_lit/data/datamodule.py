"""The data module: prepares a corpus once and streams blocks of tokens from its shards."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.posix_fast import PosixFastProfile
from torch import Tensor

from attnres_lit.data.corpora import Corpus, PythonStdlib
from attnres_lit.data.shards import Meta, prepare, verify
from attnres_lit.data.tokenizers import ByteTokenizer, Tokenizer, pack

# Lightning distrusts the length of every iterable dataset; LitData's is exact.
warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")


class TokenDataModule(LightningDataModule):
    """Batches of token blocks, int64 `(batch_size, seq_len + 1)`: inputs and targets overlap by all but one token.

    Blocks are cut end to end from the stream of documents. Training batches are shuffled anew each epoch, and a run
    resumed from a checkpoint continues with the very next batch. Validation and test read the validation split in one
    shuffled order, always the same, so that its first batches stand for the whole; predict reads it in order. Each
    data-parallel rank, as the strategy's `distributed_sampler_kwargs` count them, has its own part.

    Args:
        corpus: where the documents come from; the Python standard library if None.
        tokenizer: bytes if None.
        root: folder of all prepared corpora.
        dir: folder of this prepared corpus; `<root>/<corpus name>-<tokenizer name>` if None.
        seq_len: tokens the model sees at a time, T.
        batch_size: sequences per batch and data-parallel rank, B.
        val_fraction: share of documents held out, between 0 and 1.
        split_seed: draws another held-out share.
        seed: of the order of the training blocks.
        num_workers: processes that load batches; 0 loads them in the training process, enough for local shards.

    Raises:
        ValueError: an option is out of range; the data cannot be prepared or do not fit the options (see `shards`).
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        tokenizer: Tokenizer | None = None,
        root: str = "data",
        dir: str | None = None,
        seq_len: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        split_seed: int = 0,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("split_seed", split_seed, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
            if name.endswith("seed") and value >= 2**32:
                raise ValueError(f"{name} is {value}: it must be below 2**32")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction}: it must lie between 0 and 1, both excluded")
        self.corpus = corpus or PythonStdlib()
        self.tokenizer = tokenizer or ByteTokenizer()
        self.dir = Path(dir or Path(root) / f"{self.corpus.name}-{self.tokenizer.name}")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.seed = seed
        self.num_workers = num_workers
        self._meta: Meta | None = None

    @property
    def vocab_size(self) -> int:
        """Ids the model must provide for, known before any preparation."""
        return self.tokenizer.vocab_size

    @property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes of text of each id, int64 `(vocab_size,)`, 0 for the end of document; after `setup`."""
        return self.tokenizer.token_bytes()

    @property
    def meta(self) -> Meta:
        """What the prepared folder holds; after `setup`."""
        assert self._meta is not None
        return self._meta

    def prepare_data(self) -> None:
        """Write the shards if they are not there; runs in one process."""
        prepare(self.corpus, self.tokenizer, self.dir, self.val_fraction, self.split_seed)

    def setup(self, stage: str) -> None:
        """Check the shards against the options; runs in every process."""
        self._meta = verify(self.corpus, self.tokenizer, self.dir, self.val_fraction, self.split_seed)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the data, to be used alone: the tokenizer, and the length it was trained on."""
        return {"tokenizer": pack(self.tokenizer), "seq_len": self.seq_len}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint whose tokenizer learned something else. Raises ValueError."""
        trained, here = state_dict["tokenizer"], pack(self.tokenizer)
        if any(trained[part] != here[part] for part in ("class_path", "files")):
            raise ValueError(
                f"the checkpoint was trained with another tokenizer than the {self.tokenizer.name} of the data"
            )

    def train_dataloader(self) -> StreamingDataLoader:
        """Shuffled, a new order each epoch; the last incomplete batch is dropped."""
        overfit = getattr(self.trainer, "overfit_batches", 0)  # on the same batches each epoch
        loader = self._loader("train", shuffle=not overfit)
        limit = getattr(self.trainer, "limit_train_batches", 1.0)  # a number of batches, or a share of them
        loader.epoch_batches = min(limit, len(loader)) if isinstance(limit, int) else int(limit * len(loader))
        return loader

    def val_dataloader(self) -> StreamingDataLoader:
        """The validation split, the same batches each time; the last incomplete batch is dropped."""
        loader = self._loader("val", shuffle=True)
        loader.same_order = True
        return loader

    def test_dataloader(self) -> StreamingDataLoader:
        """As `val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> StreamingDataLoader:
        """The validation split in the order of its documents; the last incomplete batch is dropped."""
        return self._loader("val", shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> "_TokenDataLoader":
        dataset = StreamingDataset(
            str(self.dir / split),
            item_loader=TokensLoader(block_size=self.seq_len + 1),
            shuffle=shuffle,
            item_shuffle_window="full",  # LitData's default mixes only 256 neighbouring blocks
            drop_last=True,
            seed=self.seed if split == "train" else self.split_seed,
        )
        # LitData shuffles differently on network file systems; a run must not depend on where the shards lie.
        dataset.posix_fast = PosixFastProfile(kind="posix")
        ranks, rank = self._data_parallel()
        dataset.distributed_env.world_size, dataset.distributed_env.global_rank = ranks, rank
        dataset.distributed_env.num_nodes = 1
        loader = _TokenDataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_stack,
            pin_memory=torch.cuda.is_available(),
        )
        loader.identity = {
            "corpus": self.meta.corpus,
            "fingerprint": self.meta.fingerprint,
            "tokenizer": self.meta.tokenizer,
            "val_fraction": self.val_fraction,
            "split_seed": self.split_seed,
            "seq_len": self.seq_len,
            "seed": self.seed,
        }
        if len(loader) == 0:
            raise ValueError(
                f"the {split} split of {self.dir} has {self.meta.splits[split].tokens} tokens, fewer than one batch "
                f"of batch_size {self.batch_size} x (seq_len {self.seq_len} + 1) for each of {ranks} ranks: lower "
                "these, or " + ("raise val_fraction" if split == "val" else "use a larger corpus")
            )
        return loader

    def _data_parallel(self) -> tuple[int, int]:
        """Size of the data-parallel group and the rank in it: the strategy knows which processes share their data."""
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (sampler["num_replicas"], sampler["rank"]) if sampler else (1, 0)


class _TokenDataLoader(StreamingDataLoader):
    """A StreamingDataLoader whose resumed run equals the uninterrupted one under a Trainer.

    Also after the resumed epoch, after an epoch that the Trainer cut short, in a folder that has moved, and where only
    some processes are data-parallel ranks.
    """

    identity: dict[str, Any]  # what decides the order of the blocks: a checkpoint with another one cannot be resumed
    epoch_batches: int  # after which the Trainer begins a new epoch
    same_order = False  # every epoch has the order of the first

    def __iter__(self) -> Iterator[Tensor]:
        """As LitData's, but a resumed epoch is over when the Trainer has taken its last batch."""
        if self.same_order:
            self.current_epoch = 0
        for batch in super().__iter__():
            self.restore = False  # LitData clears it past the last batch, which a Trainer that counts never asks for
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """As LitData's, with the identity."""
        return {**super().state_dict(), "identity": self.identity}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """As LitData's, with the corrections. Raises ValueError for another identity."""
        for field, value in self.identity.items():
            if obj["identity"][field] != value:
                raise ValueError(
                    f"the checkpoint was trained with {field} {obj['identity'][field]!r}, the data have {value!r}: "
                    "make them equal to resume, or start a new run from the checkpoint's weights"
                )
        dataset, env = self.dataset, os.environ.get("WORLD_SIZE")
        assert isinstance(dataset, StreamingDataset)
        obj = {**obj, "dataset": {**obj["dataset"], "input_dir_path": dataset.input_dir.path}}
        # LitData compares the checkpoint's world size with that of all processes, read from here first.
        os.environ["WORLD_SIZE"] = str(dataset.distributed_env.world_size)
        try:
            super().load_state_dict(obj)
            if obj["num_samples_yielded"] >= self.epoch_batches * obj["dataset"]["batch_size"]:
                self.restore = False  # the epoch is over, though blocks are left
        finally:
            if env is None:
                del os.environ["WORLD_SIZE"]
            else:
                os.environ["WORLD_SIZE"] = env


def _stack(blocks: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(blocks).astype(np.int64))
