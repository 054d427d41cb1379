"""The documents of a prepared folder, read back one by one: what batches cut end to end, evaluation needs whole."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from attnres_lit.data.shards import SPLITS, load_meta

Ids = np.ndarray


def read_documents(folder: str | Path, split: str = "val", limit: int | None = None) -> Iterator[Ids]:
    """Yield the ids of every document of a split, its end of document included, in the order of preparation.

    Args:
        folder: what `prepare` made.
        split: "train" or "val".
        limit: documents to yield at most; None: all.

    Raises:
        ValueError: the folder is not a prepared corpus; it has no such split; a shard is missing or damaged.
    """
    meta = load_meta(folder)
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: a prepared corpus has {' and '.join(SPLITS)}")
    yield from islice(_documents(Path(folder) / split, np.dtype(meta.dtype), meta.eod), limit)


def _documents(folder: Path, dtype: np.dtype, eod: int) -> Iterator[Ids]:
    open_end: list[Ids] = []  # a document may go on in the next chunk
    try:
        chunks = json.loads((folder / "index.json").read_bytes())["chunks"]
        for chunk in chunks:
            header = 4 * (chunk["chunk_size"] + 2)  # number of pieces, then their offsets, as LitData writes it
            ids = np.memmap(folder / chunk["filename"], dtype, mode="r", offset=header, shape=(chunk["dim"],))
            *whole, rest = np.split(ids, np.flatnonzero(ids == eod) + 1)
            for document in whole:
                yield np.concatenate([*open_end, document]).astype(np.int64)
                open_end = []
            open_end.append(rest)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is damaged ({error}): delete the prepared corpus and prepare it again") from None
