"""What the parser of the command line lets through and nothing later reports in a user's words."""

import inspect
import sys
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from attnres_lit.data.corpora import Corpus
from attnres_lit.data.tokenizers import Tokenizer
from attnres_lit.residual import Residual

COMPONENTS = {"model.residual": Residual, "data.corpus": Corpus, "data.tokenizer": Tokenizer}  # chosen by class name
SECTIONS = ("trainer", "data", "model", "model.config", "model.optim")


def check_config(config: Namespace, defaults: Namespace) -> None:
    """Refuse what cannot work, before anything is built or moved. Raises ValueError."""
    for section in SECTIONS:  # `trainer:` with nothing below it replaces the whole section
        asked, known = config.get(section), vars(defaults[section])
        if not isinstance(asked, Namespace) or not known.keys() <= vars(asked).keys():
            raise ValueError(f"a config sets {section} as a whole: write options below it, or leave it out")
    if not isinstance(config.model.residual, Namespace):
        raise ValueError(f"model.residual is {config.model.residual}: it must be the name of a strategy")
    if not isinstance(config.runs_dir, str):
        raise ValueError(f"runs_dir is {config.runs_dir}: it must be a folder")
    name = Path(config.name or "")
    if name.is_absolute() or ".." in name.parts or (config.name and not name.parts):
        raise ValueError(f"name is {config.name!r}: a run lives below runs_dir; set that to have it elsewhere")
    for option, zero in (
        ("accumulate_grad_batches", False),
        ("val_check_interval", False),
        ("gradient_clip_val", True),
    ):
        value = config.trainer[option]
        if isinstance(value, int | float) and (value < 0 or (value == 0 and not zero)):
            raise ValueError(f"trainer.{option} is {value}: it must be {'at least' if zero else 'above'} 0")
    if config.data.seq_len > config.model.config.max_seq_len:
        raise ValueError(
            f"data.seq_len={config.data.seq_len} exceeds model.config.max_seq_len={config.model.config.max_seq_len}"
        )
    for key in COMPONENTS:
        if (spec := config.get(key)) and inspect.isabstract(named := class_of(spec)):
            missing = ", ".join(sorted(named.__abstractmethods__))
            raise ValueError(f"{key} {named.__name__} cannot be built: it does not define {missing}")


def class_of(spec: Namespace) -> Any:
    """The class that a parsed `class_path` names."""
    module, _, name = spec.class_path.rpartition(".")
    return getattr(sys.modules[module], name)
