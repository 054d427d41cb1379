"""Pretrained models under another residual generate, with our cache, what `transformers` generates."""

from functools import partial

import pytest
import torch

from attnres_lit.inference.generate import generate
from attnres_lit.inference.sampling import Sampling
from attnres_lit.model import Transformer, huggingface
from attnres_lit.residual import MHC, BlockAttnRes
from model.pretrained import save, tokens


@pytest.mark.parametrize("family", ["Llama 3.1", "Llama 3.2", "Mistral", "Qwen2", "Qwen3, YaRN"])
@pytest.mark.parametrize("residual", [partial(BlockAttnRes, num_blocks=2), MHC], ids=["block", "mhc"])
def test_greedy_continuations(family, residual, tmp_path):
    theirs, folder = save(family, tmp_path)
    config, _ = huggingface.read_config(folder)
    model = Transformer(config, residual).eval()
    model.load_state_dict(huggingface.read_weights(folder, config), strict=False)
    prompts = tokens(12, rows=3)
    found = generate(model, prompts, 12, Sampling(0.0), prefill_chunk=5)
    theirs.generation_config.eos_token_id = None  # an ordinary token to us
    seen = torch.ones_like(prompts)
    expected = theirs.generate(prompts, attention_mask=seen, do_sample=False, max_new_tokens=12)
    assert found == expected[:, 12:].tolist()
