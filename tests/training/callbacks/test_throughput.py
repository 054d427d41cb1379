"""Tokens per second, and the FLOPs they take."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnres_lit.training.callbacks import Throughput, throughput
from training.tiny import BATCH, TOKENS, Tokens, tiny_module, tiny_trainer


class Clock(Callback):
    """Every batch takes 2 seconds, every validation 100, all else nothing."""

    def __init__(self, monkeypatch):
        self.now, self.seen = 1000.0, []
        monkeypatch.setattr(throughput, "perf_counter", lambda: self.now)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += 2.0 if batch_idx else 50.0  # the first one starts up

    def on_validation_epoch_start(self, trainer, pl_module):
        self.now += 100.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(trainer.callback_metrics["throughput/tokens_per_sec"].item())


@pytest.mark.parametrize("ranks", [1, 3])
def test_rate(ranks, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    options = {"limit_val_batches": None, "val_check_interval": 2, "max_steps": 6}
    trainer = tiny_trainer(tmp_path, callbacks=[Throughput(window=3), clock], **options)
    if ranks > 1:
        sampler = property(lambda _: {"num_replicas": ranks, "rank": 0})
        monkeypatch.setattr(type(trainer), "distributed_sampler_kwargs", sampler)
    trainer.fit(tiny_module(), Tokens())
    tokens = ranks * BATCH * TOKENS
    assert clock.seen == pytest.approx([tokens / 50, 2 * tokens / 52, 3 * tokens / 54, *[tokens / 2] * 3])


@pytest.mark.parametrize("ranks", [1, 3])
def test_mfu_is_the_flops_that_torch_counts_over_those_there_are(ranks, tmp_path, monkeypatch):
    """2 seconds a batch; half of the scores are masked, and count half in the model's FLOPs."""
    clock = Clock(monkeypatch)
    trainer = tiny_trainer(tmp_path, callbacks=[Throughput(window=3, peak_flops=1e6), clock], max_steps=6)
    monkeypatch.setattr(type(trainer), "world_size", property(lambda _: ranks))
    module = tiny_module()
    trainer.fit(module, Tokens())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module.nats(Tokens().rows[:BATCH], "mean").backward()
    config = module.model.config
    masked = 3 * 2 * config.num_layers * config.dim * (TOKENS - 1) * BATCH * TOKENS
    expected = (counter.get_total_flops() - masked) / (2 * ranks * 1e6)
    assert trainer.callback_metrics["throughput/mfu"].item() == pytest.approx(expected)


def test_without_a_known_peak_there_is_no_mfu(tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Throughput()], max_steps=2)
    trainer.fit(tiny_module(), Tokens())
    assert "throughput/mfu" not in trainer.callback_metrics


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_of_known_gpus(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert throughput.peak_of(torch.device("cuda")) == peak
    assert throughput.peak_of(torch.device("cpu")) is None


def test_bad_options():
    with pytest.raises(ValueError, match="window=0"):
        Throughput(0)
    with pytest.raises(ValueError, match=r"peak_flops=0.0 must be above 0, or null"):
        Throughput(peak_flops=0.0)
