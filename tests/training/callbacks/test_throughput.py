"""Tokens per second."""

import pytest
from lightning.pytorch import Callback

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


def test_bad_window():
    with pytest.raises(ValueError, match="window=0"):
        Throughput(0)
