"""A model of attnres_lit as `transformers` wants it: this file lies in every export that is more than a plain Llama.

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

The network itself is that of the installed package `attnres_lit`: the same code that trained it, its fused kernels
included. What is here gives it a config, `generate` with a cache of keys and values, left-padded batches and a loss.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

try:
    from attnres_lit.inference.load import strategy
    from attnres_lit.model import Transformer, TransformerConfig
    from attnres_lit.model.attention import Rotary
except ImportError as error:  # in an export, the package may be missing
    raise ImportError("this model needs the package attnres_lit: install it, then load the model again") from error

# what outputs call the cache, by version of transformers
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class AttnResConfig(PretrainedConfig):
    """Sizes and residual strategy.

    Args:
        transformer: the fields of a TransformerConfig.
        residual: the strategy, as `{class_path, init_args}`.
    """

    model_type = "attnres_lit"
    keys_to_ignore_at_inference = (CACHE,)

    def __init__(
        self, transformer: Mapping[str, Any] | None = None, residual: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.transformer = dict(transformer or {"vocab_size": 257})
        self.residual = dict(residual or {"class_path": "attnres_lit.BlockAttnRes", "init_args": {}})
        sizes = TransformerConfig(**self.transformer)
        # the names under which tools look for them
        self.vocab_size, self.hidden_size = sizes.vocab_size, sizes.dim
        self.intermediate_size = sizes.mlp_dims if len(set(sizes.mlp_dims)) > 1 else sizes.mlp_dims[0]
        self.num_hidden_layers, self.num_attention_heads = sizes.num_layers, sizes.num_heads
        self.num_key_value_heads = sizes.num_kv_heads or sizes.num_heads
        self.head_dim, self.max_position_embeddings = sizes.head_width, sizes.max_seq_len
        kwargs = {name: value for name, value in kwargs.items() if name not in vars(self)}
        super().__init__(**kwargs | {"tie_word_embeddings": sizes.tie_embeddings})


class Earlier(NamedTuple):
    """What one attention sublayer has of earlier tokens, kept in a cache of `transformers`: see `model/kv_cache.py`."""

    cache: Any
    layer: int
    positions: Tensor  # (B, 1, T), of the new tokens
    mask: Tensor | None  # (B, 1, T, seen), true where a token sees another; None: all, causally

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of the new tokens, `(B, KV heads, T, head_dim)`; return all, `(B, KV heads, seen, head_dim)`."""
        return self.cache.update(keys, values, self.layer)


class AttnResForCausalLM(PreTrainedModel, GenerationMixin):
    """A Transformer of this package under any residual strategy.

    Args:
        config: sizes and strategy.

    Raises:
        ValueError: the strategy cannot be imported.
    """

    config_class = AttnResConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012 - as the base has it
    _supports_sdpa = True
    _no_split_modules = ["Sublayer"]  # noqa: RUF012 - as the base has it

    def __init__(self, config: AttnResConfig) -> None:
        super().__init__(config)
        self.model = Transformer(TransformerConfig(**config.transformer), strategy(config.residual))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Tables of positions, which no file holds; every parameter comes from one."""
        if isinstance(module, Rotary):
            module.reset_parameters()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """The head."""
        return self.model.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss of labels.

        Args:
            input_ids: `(B, T)`.
            attention_mask: `(B, seen)`, 0 where a token is padding, which may stand left or right.
            position_ids: `(B, T)`; by default they count the tokens that are no padding.
            cache: keys and values of the tokens before; filled with those of these tokens.
            past_key_values: its older name.
            labels: `(B, T)`, the input with -100 where a token does not count.
            use_cache: return a cache, a new one if there is none.
            logits_to_keep: of the last so many tokens, or of these; 0: of all.
            kwargs: others that tools pass; those of the loss are used.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        past = self._past(input_ids, attention_mask, position_ids, cache)
        features = self.model.features(input_ids, past)  # pyrefly: ignore[bad-argument-type]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(features[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(**{"loss": loss, "logits": logits, CACHE: cache})

    def _past(
        self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> dict[int, tuple[Earlier]]:
        """For every attention sublayer, by site; nothing where the whole text is here, without padding."""
        rows, count = tokens.shape
        before = 0 if cache is None else int(cache.get_seq_length())
        if before + count > self.model.config.max_seq_len:
            raise ValueError(f"{before + count} tokens exceed max_seq_len={self.model.config.max_seq_len}")
        padded = attention_mask is not None and not bool(attention_mask.all())
        if cache is None and not padded and position_ids is None:
            return {}
        here = torch.arange(before, before + count, device=tokens.device)
        mask = None
        if padded or (count > 1 and before):
            slots = torch.arange(before + count, device=tokens.device)
            mask = (slots <= here[:, None]).expand(rows, 1, count, -1)
            if attention_mask is not None and padded:
                # a padding token sees itself, since a softmax over nothing is not a number
                mask = (mask & attention_mask[:, None, None, :].bool()) | (slots == here[:, None])
        if position_ids is None:
            position_ids = here.expand(rows, -1)
            if attention_mask is not None and padded:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]
        cache = DynamicCache() if cache is None else cache
        return {2 * i: (Earlier(cache, i, position_ids[:, None], mask),) for i in range(self.model.config.num_layers)}


AttnResConfig.register_for_auto_class()
AttnResForCausalLM.register_for_auto_class("AutoModelForCausalLM")
