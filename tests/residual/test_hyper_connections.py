"""Hyper-Connections: orientation, what site 0 owns, and equalities with PreNorm and with static ones."""

from functools import partial

import pytest
import torch

from attnres_lit.residual import HyperConnections, PreNorm, Sources
from residual.models import build, scatter


def test_column_0_reads_and_column_j_writes_stream_j():
    residual = HyperConnections(4, 2, num_streams=2, dynamic=False)
    with torch.no_grad():
        residual.static["1"].copy_(torch.tensor([[1.0, 0.0, 2.0, 10.0], [3.0, 1.0, 5.0, 20.0]]))
    sources = Sources((), torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, None])
    h, note = residual.read(sources, 1)
    assert torch.equal(h[0, 0], torch.tensor([1.0, 3.0]))
    streams = residual.write(sources, torch.tensor([[[1.0, 1.0]]]), 1, note).stream[0, 0]
    assert torch.equal(streams, torch.tensor([[0.0 + 10, 1.0 + 10], [2.0 + 20, 5.0 + 20]]))


def test_sites_start_with_a_stream_of_their_own_and_site_0_owns_no_read():
    residual = HyperConnections(6, 8)
    assert residual.static["0"].shape == (4, 5)
    assert [int(residual.static[str(site)][:, 0].argmax()) for site in range(1, 6)] == [1, 2, 3, 0, 1]
    assert residual.projection["0"].shape == (8, 5)
    assert {id(p) for p in residual.decayed_parameters()} == {id(p) for p in residual.projection.values()}


@pytest.mark.parametrize("dynamic", [True, False])
def test_starts_as_prenorm(tokens, dynamic):
    plain = build(PreNorm)(tokens)
    torch.testing.assert_close(build(partial(HyperConnections, dynamic=dynamic))(tokens), plain, rtol=0, atol=1e-9)


def test_static_is_dynamic_without_projections(tokens):
    dynamic, static = scatter(build(HyperConnections)), build(partial(HyperConnections, dynamic=False))
    for projection in dynamic.residual.projection.values():
        torch.nn.init.zeros_(projection)
    static.load_state_dict(
        {name: p for name, p in dynamic.state_dict().items() if "projection" not in name and ".scale" not in name}
    )
    torch.testing.assert_close(dynamic(tokens), static(tokens), rtol=0, atol=1e-12)


def test_one_stream_is_refused():
    with pytest.raises(ValueError, match="HyperConnections needs num_streams >= 2, got 1"):
        HyperConnections(4, 8, num_streams=1)
