"""Compiled sublayers: one graph per kind, whatever the depth and the strategy."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from residual.models import CONFIGS, factory_from_yaml
from training.tiny import BATCH, TOKENS, VOCAB, tiny_config, tiny_module


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs instead of generating code for them."""
    counter = CompileCounter()
    compile_in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_in_place(self, backend=counter))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("num_layers", [4, 10])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_two_graphs_in_training(path, num_layers, counter):
    config = tiny_config(num_layers=num_layers)
    eager = tiny_module(factory_from_yaml(path), config=config)
    module = tiny_module(factory_from_yaml(path), config=config, compile=True)
    module.configure_model()
    module.configure_model()  # Lightning may ask again
    assert module.state_dict().keys() == eager.state_dict().keys()
    for seed in range(2):
        batch = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
        loss = module.nats(batch, "mean")
        loss.backward()
        torch.testing.assert_close(
            loss, eager.nats(batch, "mean"), rtol=1e-6, atol=0.0
        )  # norms are spelt out in a graph
    assert counter.frame_count == 2


def test_a_graph_for_every_width(counter):
    module = tiny_module(config=tiny_config(num_layers=4, hidden_dim=[16, 80, 80, 16]), compile=True)
    module.configure_model()
    module.nats(torch.zeros(BATCH, TOKENS + 1, dtype=torch.long), "mean").backward()
    assert counter.frame_count == 3  # of attention, and of MLPs of two widths


def test_graphs_of_a_run_stay_below_the_limit(counter):
    """Beyond `recompile_limit` graphs of one function, torch falls back to eager without an error."""
    module = tiny_module(compile=True)
    module.configure_model()

    def graphs(batch_size):
        module.nats(torch.zeros(batch_size, TOKENS + 1, dtype=torch.long), "mean")
        return counter.frame_count

    assert graphs(BATCH) == 2
    with torch.inference_mode():
        assert graphs(BATCH) == 4  # validation
    assert graphs(BATCH) == 4
    assert graphs(BATCH - 1) == 6  # from here on for any batch size
    assert graphs(BATCH - 2) == 6
    with torch.inference_mode():
        assert graphs(BATCH - 1) <= torch._dynamo.config.recompile_limit
