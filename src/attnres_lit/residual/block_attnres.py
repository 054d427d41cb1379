"""Block Attention Residuals: the sum of a block's outputs is one source (arXiv 2603.15031, section 3.2, Eq. 5-6).

    h_s = sum_i softmax_i(query_s . RMSNorm(v_i)) v_i        v = [embedding, finished blocks..., partial]
    b_n = sum of f_j(h_j) over the sites j of block n        the partial is b_n so far, absent at a block's first site

The embedding is never summed into a block. A block closes in `write`, at its last site.
"""

from bisect import bisect_left
from itertools import accumulate

from torch import Tensor

from attnres_lit.ops import Mixing, Query
from attnres_lit.residual.attnres import AttnRes, TwoPhase
from attnres_lit.residual.base import Note, Sources


class BlockAttnRes(AttnRes):
    """Attend over the embedding, the finished blocks and the partial sum of the current block.

    At most one of the first three options is given; 8 blocks if none is (with fewer than 8 sites: one block a site).

    Args:
        num_sites: sublayers of the whole model.
        dim: model width D.
        num_blocks: split the sites into this many blocks; the first `num_sites % num_blocks` are one site longer.
        block_size: sublayers per block; the last block may be short. 1 is Full AttnRes.
        boundaries: the sites at which a new block starts; site 0 is implied.
        query: "static", a learned query per site, or "input", a learned matrix times the newest source.
        mixing: "softmax"; "sigmoid", whose weights do not compete; "static", the softmax of learned numbers, without
            queries and keys.
        key_norm: RMSNorm with a learned gain on the keys.
        num_heads: heads; each attends over depth with its own slice of D.
        two_phase: answer the queries of a block against the finished sources in one pass; "auto": where that measured
            faster. Needs static queries and the softmax.
        eps: of the norm on keys.

    Raises:
        ValueError: more than one way to cut given; a cut that does not fit `num_sites`; `num_heads` does not divide
            `dim`; an unknown `query` or `mixing`; options that exclude one another.
    """

    starts_as_prenorm = True

    def __init__(
        self,
        num_sites: int,
        dim: int,
        num_blocks: int | None = None,
        block_size: int | None = None,
        boundaries: list[int] | None = None,
        query: Query = "static",
        mixing: Mixing = "softmax",
        key_norm: bool = True,
        num_heads: int = 1,
        two_phase: TwoPhase = "auto",
        eps: float = 1e-6,
    ) -> None:
        starts = block_starts(num_sites, num_blocks, block_size, boundaries)
        # the embedding, and the blocks that began before: finished ones, and the one being summed
        num_sources = [1 + bisect_left(starts, site) for site in range(num_sites + 1)]
        super().__init__(num_sites, dim, query, mixing, key_norm, num_heads, two_phase, eps, num_sources)
        self.starts = starts
        self._last_sites = {start - 1 for start in (*self.starts[1:], num_sites)}
        self._share_phase_one(self.starts, seen=range(1, num_sites + 1))  # the embedding, and the blocks before

    def open(self, embedding: Tensor) -> Sources:
        """The embedding is the first source; no block has begun."""
        return Sources((embedding,), None)

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """Add the output to the partial; at the last site of a block the partial becomes a source."""
        partial = output if sources.partial is None else sources.partial + output
        if site in self._last_sites:
            return Sources((*sources.done, partial), None, note)
        return Sources(sources.done, partial, note)


def block_starts(
    num_sites: int,
    num_blocks: int | None = None,
    block_size: int | None = None,
    boundaries: list[int] | None = None,
) -> tuple[int, ...]:
    """First site of every block. At most one of the last three is given; 8 blocks if none is.

    Raises:
        ValueError: more than one given, or one that does not fit `num_sites`.
    """
    options = {"num_blocks": num_blocks, "block_size": block_size, "boundaries": boundaries}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"BlockAttnRes takes one of num_blocks, block_size, boundaries; got {' and '.join(given)}: "
            "set the others to null"
        )
    if boundaries is not None:
        starts = [start for start in boundaries if start != 0]
        if starts != sorted(set(starts)) or not all(0 < start < num_sites for start in starts):
            raise ValueError(f"boundaries={boundaries} must be increasing sites between 1 and {num_sites - 1}")
        return (0, *starts)
    if block_size is not None:
        if not 1 <= block_size <= num_sites:
            raise ValueError(f"block_size={block_size} must be between 1 and the number of sites, {num_sites}")
        return tuple(range(0, num_sites, block_size))
    count = min(8, num_sites) if num_blocks is None else num_blocks
    if not 1 <= count <= num_sites:
        raise ValueError(f"num_blocks={count} must be between 1 and the number of sites, {num_sites}")
    size, longer = divmod(num_sites, count)
    sizes = [size + 1] * longer + [size] * (count - longer)
    return tuple(accumulate(sizes[:-1], initial=0))
