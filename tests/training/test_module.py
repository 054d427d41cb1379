"""The loss, what is measured and logged, and what is said on the way."""

import csv
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from attnres_lit.residual import PreNorm
from attnres_lit.training import OptimConfig
from attnres_lit.training.callbacks import DepthDynamics, DepthWeights, Throughput
from parallel.world import on_ranks
from training.tiny import BATCH, TOKENS, VOCAB, Tokens, tiny_module, tiny_trainer

TOKEN_BYTES = torch.arange(VOCAB) % 4  # a multiple of 4 stands for the end of a document


def nats_of(module, rows):
    """`(rows, T)`, by the definition."""
    log_p = module(rows[:, :-1]).double().log_softmax(-1)
    return -log_p.gather(-1, rows[:, 1:, None]).squeeze(-1).detach()


@pytest.mark.parametrize("split", ["val", "test"])
def test_metrics_weigh_every_token_of_the_split(split, tmp_path):
    data, module = Tokens(val_rows=6, token_bytes=TOKEN_BYTES), tiny_module()
    trainer = tiny_trainer(tmp_path, limit_val_batches=None)
    (metrics,) = (trainer.validate if split == "val" else trainer.test)(module, data, verbose=False)
    nats = nats_of(module, data.rows[:6])  # a batch of 4 rows and one of 2
    assert metrics[f"{split}/loss"] == pytest.approx(nats.mean().item(), rel=1e-6)
    assert metrics[f"{split}/ppl"] == pytest.approx(nats.mean().exp().item(), rel=1e-6)
    text = TOKEN_BYTES[data.rows[:6, 1:]].sum().item()
    assert metrics[f"{split}/bpb"] == pytest.approx(nats.sum().item() / math.log(2) / text, rel=1e-6)


def test_no_bits_per_byte_without_token_bytes(tmp_path):
    (metrics,) = tiny_trainer(tmp_path, limit_val_batches=None).validate(tiny_module(), Tokens(), verbose=False)
    assert set(metrics) == {"val/loss", "val/ppl"}


def validated(folder, **ranks):
    data, trainer = Tokens(val_rows=6, token_bytes=TOKEN_BYTES), tiny_trainer(folder, limit_val_batches=None, **ranks)
    return trainer.validate(tiny_module(), data, verbose=False)[0]


def test_two_processes_measure_the_whole_split(tmp_path):
    """Batches of 4 and 2 rows; one of 3 on each rank."""
    for metrics in on_ranks(2, validated, tmp_path, strategy="ddp", devices=2):
        assert metrics == pytest.approx(validated(tmp_path), rel=1e-6)


def test_predict_gives_log_probabilities(tmp_path):
    data, module = Tokens(val_rows=6), tiny_module()
    predictions = tiny_trainer(tmp_path).predict(module, data)
    assert [tuple(each.shape) for each in predictions] == [(4, TOKENS), (2, TOKENS)]
    torch.testing.assert_close(torch.cat(predictions).double(), -nats_of(module, data.rows[:6]))


def test_bfloat16_loss_is_fp32():
    module = tiny_module()
    with torch.autocast("cpu", torch.bfloat16):
        assert module.nats(torch.zeros(1, 5, dtype=torch.long), "mean").dtype == torch.float32


def logged(tmp_path, residual=None, **options):
    loggers = [TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path, name="csv", version="")]
    callbacks = [Throughput(), DepthDynamics(every_n_steps=4), DepthWeights(tmp_path)]
    every = {"log_every_n_steps": 3, "val_check_interval": 5, "limit_val_batches": None}
    trainer = tiny_trainer(tmp_path, max_steps=10, logger=loggers, callbacks=callbacks, **every | options)
    trainer.fit(tiny_module(residual) if residual else tiny_module(), Tokens(token_bytes=TOKEN_BYTES))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    return events, trainer


def test_everything_is_logged_from_the_first_step(tmp_path):
    events, _ = logged(tmp_path)
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    every_third = [0, 2, 5, 8]
    depth = [f"depth/{name}/{layer}" for name in ("output_rms", "grad_norm") for layer in range(2)]
    assert {name: at for name, at in steps.items() if name not in ("epoch", "hp_metric")} == {
        "train/loss": every_third,
        "lr": every_third,
        "grad_norm": every_third,
        "throughput/tokens_per_sec": every_third,
        "val/loss": [4, 9],
        "val/ppl": [4, 9],
        "val/bpb": [4, 9],
        **{name: [0, 4, 8] for name in depth},
    }
    assert [event.step for event in events.Images("depth/weights")] == [4, 9]
    with np.load(tmp_path / "depth_weights.npz") as newest:
        assert (newest["step"], newest["sites"].tolist()) == (10, [0, 1, 2, 3, 4])
        assert np.nansum(newest["weights"], axis=1) == pytest.approx(np.ones(5), abs=1e-5)
        assert np.isnan(newest["weights"][1]).tolist() == [False, False, True, True, True]
    with open(tmp_path / "csv" / "metrics.csv") as file:
        first = next(row for row in csv.DictReader(file) if row["train/loss"])
    assert (first["step"], float(first["lr"])) == ("0", pytest.approx(1e-2 / 4))


def test_accumulated_batches_are_one_step(tmp_path):
    events, _ = logged(tmp_path, accumulate_grad_batches=2, val_check_interval=24)
    assert [event.step for event in events.Scalars("train/loss")] == [0, 2, 5, 8]
    assert [event.step for event in events.Scalars("depth/grad_norm/1")] == [0, 4, 8]


def test_no_picture_without_depth_attention(tmp_path):
    events, _ = logged(tmp_path, PreNorm)
    assert events.Tags()["images"] == []
    assert not (tmp_path / "depth_weights.npz").exists()
    assert "depth/output_rms/1" in events.Tags()["scalars"]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.01}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}],
    ids=["none", "norm", "value"],
)
def test_clipping_and_the_norm_before_it(options, tmp_path):
    trainer, module = tiny_trainer(tmp_path, max_steps=1, **options), tiny_module()
    gradients = torch.autograd.grad(module.nats(Tokens().rows[:BATCH], "mean"), list(module.parameters()))
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    trainer.fit(module, Tokens())
    assert trainer.callback_metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
    limit = options.get("gradient_clip_val")
    by_value = "gradient_clip_algorithm" in options
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        clipped = gradient.clamp(-limit, limit) if by_value else gradient * (limit / norm if limit else 1)
        torch.testing.assert_close(parameter.grad, clipped, rtol=1e-4, atol=1e-8)


def test_bf16_trains_with_clipping(tmp_path):
    """Lightning refuses to clip for fused optimizers in mixed precision; this module clips by itself."""
    trainer = tiny_trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=1.0)
    trainer.fit(tiny_module(), Tokens())
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_a_schedule_shorter_than_the_run_is_said(tmp_path):
    optim = OptimConfig(warmup_steps=0, total_steps=3)
    with pytest.warns(UserWarning, match="max_steps=4 exceeds optim.total_steps=3") as warned:
        tiny_trainer(tmp_path).fit(tiny_module(optim=optim), Tokens())
    assert "\n" not in str(next(each.message for each in warned if "total_steps" in str(each.message)))


def test_a_model_learns_one_batch(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=120, overfit_batches=1)
    trainer.fit(tiny_module(optim=OptimConfig(lr=2e-2, warmup_steps=4, total_steps=120)), Tokens())
    assert trainer.callback_metrics["train/loss"] < 0.5 * math.log(VOCAB)
