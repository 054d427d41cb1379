"""Mistakes on the command line, in a user's words: what the parser lets through, and what it says of the rest."""

import difflib
import inspect
import re
import sys
from argparse import ArgumentParser
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


def explain(message: str, parser: ArgumentParser) -> str:
    """A parser's message in one line; where a name is unknown, with the nearest that is known."""
    message = " ".join(message.split())
    component = re.search(
        r'"([\w.]+)": .*?(?:Expected a path but (\S+) either|import path string: (\S+)|file loop detected: (\S+))',
        message,
    )
    if component and (base := COMPONENTS.get(component[1])):
        known = sorted(each.__name__ for each in concrete(base))
        if component[4]:  # a file that is no class with options is taken for the name of one
            return f"{component[4]} does not say which {component[1]}: write a class_path; known are {', '.join(known)}"
        name = component[2] or component[3]
        if name.endswith((".yaml", ".yml")):
            return f"{component[1]}: there is no file {name}"
        return f"unknown {component[1]} {name!r}: known are {', '.join(known)}" + nearest(name, known)
    if component and component[3]:
        return f"unknown class {component[3]!r} in {component[1]}: give its dotted path"
    flag = re.search(r"unrecognized arguments: --([\w.]+)|Subcommand '\w+' does not accept option '([\w.]+)'", message)
    if flag:
        return message + nearest(flag[1] or flag[2], options(parser))
    option = re.search(r"Option '([\w.]+)' is not accepted", message)
    if option:  # this parser is that of the class whose option it is
        known = [name for name in options(parser) if name != "help"]
        return f"unknown option {option[1]!r}: known are {', '.join(known) or 'none'}" + nearest(option[1], known)
    return message


def options(parser: ArgumentParser) -> list[str]:
    """The names of a parser's options, its subcommands' included."""
    names = []
    for action in parser._actions:
        if isinstance(action.choices, dict):
            names += [name for sub in action.choices.values() for name in options(sub)]
        else:
            names.append(action.dest)
    return names


def nearest(name: str, known: list[str]) -> str:
    """ "; did you mean ...?", or nothing."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def concrete(base: type) -> set[type]:
    """All classes below `base` that have been imported and can be built."""
    below = {each for direct in base.__subclasses__() for each in {direct} | concrete(direct)}
    return {each for each in below if not inspect.isabstract(each)}
