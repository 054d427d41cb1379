"""What a run on a single token learns of a strategy."""

import pytest
import torch

from attnres_lit.parallel.depth import Cut, trace
from attnres_lit.residual import MHC, BlockAttnRes, DenseFormer, FullAttnRes, PreNorm, Residual, Sources


def test_block():
    depth = trace(BlockAttnRes(6, 4, block_size=2))
    assert depth.cuts == (
        Cut((0,), None),  # the embedding
        Cut((0,), 1),
        Cut((0, 2), None),
        Cut((0, 2), 3),
        Cut((0, 2, 4), None),
        Cut((0, 2, 4), 5),
        Cut((0, 2, 4, 6), None),
    )
    assert depth.shapes == ((4,),) * 7


@pytest.mark.parametrize(("residual", "shape"), [(PreNorm, (4,)), (MHC, (4, 4))])
def test_one_tensor_at_every_cut(residual, shape):
    depth = trace(residual(6, 4))
    assert [cut.tensors for cut in depth.cuts] == [(i,) for i in range(7)]
    assert set(depth.shapes) == {torch.Size(shape)}


def test_a_partial_that_is_a_source_counts_once():
    cuts = trace(DenseFormer(4, 4)).cuts
    assert cuts[0] == Cut((0,), 0)
    assert [len(cut.tensors) for cut in cuts] == [1, 2, 3, 3, 1]  # after a layer: outputs, and their average


@pytest.mark.parametrize("residual", [DenseFormer, MHC, FullAttnRes, BlockAttnRes])
def test_every_parameter_is_used_somewhere(residual):
    made = residual(8, 4)
    uses = trace(made).uses
    assert len(uses) == 9
    assert set().union(*uses) == {name for name, _ in made.named_parameters()}
    for site, names in enumerate(uses[:-1]):
        assert all(name.split(".")[1] == str(site) for name in names)


def test_leaves_the_strategy_as_it_was():
    made = BlockAttnRes(8, 4)
    made.depth_backend = "fla"
    trace(made)
    assert made.depth_backend == "fla"
    assert all(parameter.grad is None for parameter in made.parameters())


def test_refuses_a_tensor_without_tokens():
    class Odd(Residual):
        def open(self, embedding):
            return Sources((), embedding.flatten())

        def read(self, sources, site):
            return sources.stream, ()

        write = exit = read

    with pytest.raises(ValueError, match=r"Odd passes on a tensor of shape \(4,\): it must begin with \(B, T\)"):
        trace(Odd(2, 4))
