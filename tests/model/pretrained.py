"""Small randomly initialised models of `transformers`, one of each family, saved as their users save them."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
AutoModelForCausalLM = transformers.AutoModelForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # as much as makes every part count
    "bos_token_id": None,
    "eos_token_id": 60,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"original_max_position_embeddings": 16}
# what the released models of each family have of their own
FAMILIES = {
    "Llama 2": ("Llama", {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "Llama 3.1": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e5, **LLAMA3, **LONG}}),
    "Llama 3.2": ("Llama", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": {**LLAMA3, **LONG}}),
    "Llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "SmolLM2": ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}}),
    "Mistral": ("Mistral", {"rms_norm_eps": 1e-5, "sliding_window": 40, "head_dim": 16}),
    "Qwen2": ("Qwen2", {"rope_parameters": {"rope_theta": 1e6}}),
    "Qwen2.5, YaRN": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "Qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6}}),
    "Qwen3, YaRN": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
}


def make(family):
    """A model of the family in eval mode, the embedding as small as those of trained models."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    torch.manual_seed(len(family))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases and gains, which start at 0 and 1
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if "embed_tokens" in parameter_name:
                parameter.mul_(0.1)
    return model


def save(family, folder, **options):
    """Returns the model and the folder."""
    model = make(family)
    model.save_pretrained(folder, **options)
    return model, folder


def tokens(count=40, rows=2):
    return torch.randint(SIZES["vocab_size"], (rows, count), generator=torch.Generator().manual_seed(0))
