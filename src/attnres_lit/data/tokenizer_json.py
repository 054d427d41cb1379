"""Every tokenizer as files that `transformers` reads: `tokenizer.json` and what belongs beside it."""

import json
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from attnres_lit.data.hf_tokenizer import HFTokenizer
from attnres_lit.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer

END = "<|endoftext|>"  # how the end of document is spelt where the tokenizer has no spelling for it


def tokenizer_files(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, str]:
    """Text of each file, by its name. Encodes and decodes as the tokenizer does, but takes `END` in a text for its id.

    Args:
        tokenizer: trained.
        max_seq_len: of the model.

    Raises:
        ValueError: it is of a class of a user's own, which this cannot know.
    """
    if isinstance(tokenizer, HFTokenizer):
        made = tokenizer.library
        end = made.id_to_token(tokenizer.eod)
    elif isinstance(tokenizer, BPETokenizer):
        made, end = _with_end(json.loads(tokenizer.library.to_str()), tokenizer.eod), END
    elif isinstance(tokenizer, ByteTokenizer):
        made, end = _with_end(json.loads(_bytes().to_str()), tokenizer.eod), END
    else:
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json: export takes bytes, BPE and HFTokenizer")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("eos_token", "bos_token", "pad_token"), end),
    }
    return {"tokenizer.json": made.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}


def _bytes() -> tokenizers.Tokenizer:
    """One token a byte, its id the byte."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({_letter(byte): byte for byte in range(256)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _letter(byte: int) -> str:
    """What stands for a byte in byte-level vocabularies: itself, if it prints, else the next letter from U+0100 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in prints else chr(256 + sum(each not in prints for each in range(byte)))


def _with_end(described: dict[str, Any], eod: int) -> tokenizers.Tokenizer:
    """With the end of document as a special token: in the vocabulary too, since ids below it may be unused."""
    described["model"]["vocab"][END] = eod
    special = {"id": eod, "content": END, "special": True, "normalized": False}
    described["added_tokens"] = [special | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)]
    return tokenizers.Tokenizer.from_str(json.dumps(described))
