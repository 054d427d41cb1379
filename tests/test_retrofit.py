"""`--model.init_from` a Hugging Face folder, as a user types it: sizes and tokenizer follow, the loss starts there."""

import json
import sys
from pathlib import Path

import pytest
import torch

from attnres_lit.cli import main
from attnres_lit.inference.load import load
from data.test_hf_tokenizer import byte_level
from model.pretrained import FAMILIES, SIZES, transformers
from test_cli import csv_rows, fails

RETROFIT = str(Path(__file__).parents[1] / "configs/experiment/retrofit.yaml")
SMALL = [
    "--data.corpus=TextFiles",
    "--data.corpus.paths=[text.txt]",
    "--data.corpus.one_document_per=line",
    "--data.seq_len=16",
    "--data.batch_size=4",
    "--data.val_fraction=0.3",
    "--trainer.max_steps=3",
    "--trainer.limit_val_batches=2",
    "--trainer.val_check_interval=3",
    "--trainer.log_every_n_steps=1",
    "--model.init_from=Tiny",
]


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnres_lit"])
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small corpus, the {i % 7}th\n" for i in range(300)))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES | FAMILIES["Qwen2"][1] | {"vocab_size": 384, "eos_token_id": 0})
    transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained("Tiny")  # as models are released
    byte_level()[0].save("Tiny/tokenizer.json")
    return tmp_path


def first_loss(name):
    return float(next(row["train/loss"] for row in csv_rows(f"runs/{name}") if row["train/loss"]))


def test_a_run_starts_at_the_pretrained_loss():
    for residual in (strategies := ("BlockAttnRes", "MHC", "PreNorm")):
        main(["fit", "--config", RETROFIT, *SMALL, f"--model.residual={residual}"])
    losses = [first_loss(name) for name in strategies]
    assert max(losses) - min(losses) < 1e-4, losses
    stored = torch.load("runs/BlockAttnRes/checkpoints/last.ckpt", weights_only=True)
    config = stored["hyper_parameters"]["config"]
    assert (config["dim"], config["vocab_size"], config["norm_eps"], config["qkv_bias"]) == (32, 384, 1e-6, True)
    assert stored["TokenDataModule"]["tokenizer"]["class_path"].endswith("HFTokenizer")
    main(["fit", "--config", RETROFIT, *SMALL, "--name=BlockAttnRes", "--ckpt_path=last", "--trainer.max_steps=4"])


def test_what_was_trained_goes_back_and_comes_in_again(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for residual, kind in (("PreNorm", "Qwen2ForCausalLM"), ("BlockAttnRes", "AttnResForCausalLM")):
        main(["fit", "--config", RETROFIT, *SMALL, f"--model.residual={residual}"])
        checkpoint = f"runs/{residual}/checkpoints/last.ckpt"
        main(["export", "--ckpt_path", checkpoint, "--out", f"Out-{residual}"])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"Out-{residual}", trust_remote_code=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"Out-{residual}", trust_remote_code=True)
        assert type(theirs).__name__ == kind
        model, own, *_ = load(checkpoint)
        ids = tokenizer("line 5 of a small corpus", return_tensors="pt").input_ids
        assert ids[0].tolist() == own.encode("line 5 of a small corpus").tolist()
        with torch.inference_mode():
            torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=0, atol=1e-5)
        assert tokenizer.eos_token_id == own.eod == theirs.generation_config.eos_token_id
    assert "Out-BlockAttnRes: needs attnres_lit and trust_remote_code=True" in capfd.readouterr().out
    again = [flag.replace("Tiny", "Out-BlockAttnRes") for flag in SMALL]
    main(["fit", "--config", RETROFIT, *again, "--name=again"])
    assert "Starting from the weights of Out-BlockAttnRes, at step 0." in caplog.text  # the residual's too
    assert "Out-PreNorm is there already" in fails(capfd, "export", "--ckpt_path", checkpoint, "--out", "Out-PreNorm")


def test_mistakes_get_one_line(capfd, workdir):
    fit = ["fit", "--config", RETROFIT, *SMALL]
    line = fails(capfd, *fit, "--model.config.dim=64", "--model.config.rope_theta=5000")
    assert "model.config.dim=64, Tiny has 32; model.config.rope_theta=5000.0, Tiny has 1000000.0: leave it out" in line
    assert "max_seq_len=65, Tiny has 64" in fails(capfd, *fit, "--model.config.max_seq_len=65")
    assert "data.seq_len=65 exceeds model.config.max_seq_len=64" in fails(capfd, *fit, "--data.seq_len=65")
    line = fails(capfd, *fit, "--data.tokenizer=ByteTokenizer")
    assert "data.tokenizer=ByteTokenizer has 257 ids, the model in Tiny 384" in line
    (workdir / "Tiny/tokenizer.json").unlink()
    assert "there is no Tiny/tokenizer.json" in fails(capfd, *fit)
    byte_level()[0].save("Tiny/tokenizer.json")
    (workdir / "Tiny/model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors is missing or damaged" in fails(capfd, *fit)
    (workdir / "Tiny/config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "model_type=gpt2 is not supported" in fails(capfd, *fit)
    assert not (workdir / "runs").exists()
