"""Numbers of the paper on Attention Residuals (arXiv 2603.15031), and which of its rows a run reproduces.

A run is recognised by its strategy and options, whatever its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Options = Mapping[str, Any]
PLAIN = {  # what all but the ablations share
    "window": None,
    "query": "static",
    "mixing": "softmax",
    "key_norm": True,
    "num_heads": 1,
    "boundaries": None,
}


@dataclass(frozen=True)
class Row:
    """A row of Table 4: validation loss of a model of 436M active parameters, 32 sublayers."""

    label: str
    loss: float
    strategy: str  # class
    matches: Callable[[Options], bool] = lambda options: True


def _only(changed: str, test: Callable[[Any], bool], **others: Any) -> Callable[[Options], bool]:
    """Whether an option is as asked, others have these values, and the rest are plain."""

    def matches(options: Options) -> bool:
        wanted = {**PLAIN, **others}
        rest = all(options.get(key, value) == value for key, value in wanted.items() if key != changed)
        return rest and test(options.get(changed, PLAIN.get(changed)))

    return matches


def _is(value: Any) -> Callable[[Any], bool]:
    return lambda found: found == value


TABLE_4 = (
    Row("PreNorm", 1.766, "PreNorm"),
    Row("DenseFormer", 1.767, "DenseFormer"),
    Row("mHC", 1.747, "MHC", _only("projection", lambda name: name != "permutations")),
    Row("Full AttnRes", 1.737, "FullAttnRes", _only("window", _is(None))),
    Row("Full, input-dependent query", 1.731, "FullAttnRes", _only("query", _is("input"))),
    Row("Full, input-independent mixing", 1.749, "FullAttnRes", _only("mixing", _is("static"))),
    Row("Full, sigmoid", 1.741, "FullAttnRes", _only("mixing", _is("sigmoid"))),
    Row("Full, no RMSNorm on keys", 1.743, "FullAttnRes", _only("key_norm", _is(False))),
    Row("sliding window, 1 + 8", 1.764, "FullAttnRes", _only("window", _is(8))),
    Row("Block, S = 4", 1.746, "BlockAttnRes", _only("block_size", _is(4))),
    Row("Block, heads of depth attention", 1.752, "BlockAttnRes", _only("num_heads", lambda n: n > 1, block_size=4)),
    Row("Block, no RMSNorm on keys", 1.750, "BlockAttnRes", _only("key_norm", _is(False), block_size=4)),
)
BASELINE = 1.766

BLOCK_SIZES = {1: 1.737, 2: 1.746, 4: 1.746, 8: 1.748, 16: 1.753, 32: 1.757}  # Fig. 6: loss by sublayers a block

SCALING = {  # Table 2: loss by active parameters in millions
    "PreNorm": {194: 1.931, 241: 1.895, 296: 1.829, 436: 1.766, 528: 1.719},
    "Block": {194: 1.909, 241: 1.875, 296: 1.809, 436: 1.746, 528: 1.693},
    "Full": {194: 1.899, 241: 1.874, 296: 1.804, 436: 1.737, 528: 1.692},
    "mHC-lite": {194: 1.906, 241: 1.869, 296: 1.807, 436: 1.747, 528: 1.694},
}
SIZES = tuple(SCALING["PreNorm"])
FITS = {"PreNorm": (1.891, 0.057), "Block": (1.870, 0.058), "Full": (1.865, 0.057)}  # Fig. 4: A, alpha
ADVANTAGE = 1.25  # Fig. 4: of Block, at 5.6 PFLOP/s-days

DIM_BY_LAYERS = (15, 30, 45, 60, 75)  # Fig. 7: columns
HEADS_BY_LAYERS = (0.7, 0.6, 0.5, 0.4, 0.3)  # rows
ARCHITECTURES = {
    "PreNorm": np.array(
        [
            [2.017, 1.909, 1.875, 1.851, 1.858],
            [1.990, 1.902, 1.862, 1.852, 1.862],
            [1.973, 1.883, 1.859, 1.849, 1.854],
            [1.952, 1.868, 1.850, 1.849, 1.857],
            [1.926, 1.857, 1.851, 1.847, 1.858],
        ]
    ),
    "AttnRes": np.array(
        [
            [1.954, 1.890, 1.843, 1.828, 1.824],
            [1.931, 1.863, 1.830, 1.817, 1.818],
            [1.917, 1.841, 1.819, 1.812, 1.817],
            [1.893, 1.823, 1.815, 1.813, 1.813],
            [1.877, 1.816, 1.802, 1.806, 1.820],
        ]
    ),
}
ARCHITECTURE_LOSSES = (1.80, 2.02)  # they are all between these


def row_of(strategy: str, options: Options) -> Row | None:
    """The row of Table 4 that a strategy with these options reproduces; the block size is in sublayers, as there."""
    return next((row for row in TABLE_4 if row.strategy == strategy and row.matches(options)), None)


def is_plain(options: Options) -> bool:
    """Whether nothing but how sublayers are cut into blocks differs from the paper's AttnRes."""
    return all(options.get(key, value) == value for key, value in PLAIN.items())


def column_of(strategy: str, options: Options) -> str | None:
    """The column of Table 2: PreNorm, Block (8 blocks), Full or mHC-lite."""
    if strategy == "PreNorm":
        return "PreNorm"
    if strategy == "MHC":
        return "mHC-lite" if options.get("projection") == "permutations" else None
    if strategy == "FullAttnRes":
        return "Full" if is_plain(options) else None
    if strategy == "BlockAttnRes" and options.get("block_size") is None:
        return "Block" if _only("num_blocks", lambda n: n in (None, 8))(options) else None
    return None
