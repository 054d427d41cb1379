"""The command line: `python -m attnres_lit {fit,validate,test,predict,prepare} --config ...`.

LightningCLI, with what a run needs around it: a fixed folder per run, `--ckpt_path last`, and errors of one line.
"""

import difflib
import inspect
import logging
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning
import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import attnres_lit
from attnres_lit.checks import COMPONENTS, check_config, class_of
from attnres_lit.data.datamodule import TokenDataModule
from attnres_lit.training.checkpoint import check_resume, fitting_weights
from attnres_lit.training.module import LanguageModel

TURNED_OFF_BY = {  # Lightning refuses these flags, or leaves them without effect, while such a callback is configured
    "enable_progress_bar": pl.callbacks.ProgressBar,
    "enable_checkpointing": pl.callbacks.Checkpoint,
    "enable_model_summary": pl.callbacks.ModelSummary,
}


class Trainer(pl.Trainer):
    """Lightning's Trainer, and a subcommand that prepares data."""

    def prepare(self, model: LanguageModel, datamodule: TokenDataModule) -> None:
        """Tokenise the corpus into shards, unless they are there already; needs no accelerator."""
        datamodule.prepare_data()
        datamodule.setup("fit")
        splits = (f"{split} {part.tokens:,} tokens" for split, part in datamodule.meta.splits.items())
        rank_zero_info(f"{datamodule.dir}: {', '.join(splits)}")


class Parser(LightningArgumentParser):
    """Reports an error in one line, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and what would be right; exit code 2."""
        fail(explain(message, self))


class SaveConfig(SaveConfigCallback):
    """Writes the run's `config.yaml` once training begins: a refused resume, or a validation, leaves the old one."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it."""
        super().setup(trainer, pl_module, "fit")


class CLI(LightningCLI):
    """See the module docstring."""

    config: Any

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            LanguageModel,
            TokenDataModule,
            trainer_class=Trainer,
            parser_class=Parser,
            parser_kwargs={"prog": "attnres_lit", "version": attnres_lit.__version__, "allow_abbrev": False},
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `prepare`."""
        return LightningCLI.subcommands() | {"prepare": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Where a run lives, and what the model learns from the data."""
        parser.add_argument("--name", type=str | None, default=None, help="Name of the run; null: from the residual.")
        parser.add_argument("--runs_dir", type=str, default="runs", help="A run lives in <runs_dir>/<name>.")
        parser.add_argument(
            "--num_threads",
            type=PositiveInt,
            default=1,
            help="Threads of torch on the CPU: more pay for wide models on an idle machine.",
        )
        parser.link_arguments("data.vocab_size", "model.config.vocab_size", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Lightning lets a checkpoint's hyper-parameters override the command line; here a conflict is an error."""

    def before_instantiate_classes(self) -> None:
        """Find the run's folder, and the checkpoint that "last" and "best" stand for."""
        config = self.config[self.config.subcommand]
        check_config(config, self._parser(self.config.subcommand).get_defaults())
        self.folder = Path(config.runs_dir) / (config.name or run_name(config.model.residual))
        torch.set_num_threads(config.num_threads)
        if self.config.subcommand != "prepare":
            config.weights_only = True
        if self.config.subcommand != "fit":
            config.trainer.logger = False  # the curves of the run stay those of its training
        if config.get("ckpt_path") is not None:
            config.ckpt_path = str(find_checkpoint(self.folder, config.ckpt_path))
        elif config.model.init_from:
            check_readable(Path(config.model.init_from), "--model.init_from")

    def instantiate_classes(self) -> None:
        """With the run's folder in place of "{run}", which the saved config keeps: it may run under another name."""
        config = self.config[self.config.subcommand]
        asked, config.trainer = config.trainer, substitute(config.trainer, str(self.folder))
        super().instantiate_classes()
        config.trainer = asked

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Without the callbacks that a flag turns off."""
        config = self.config_init[self.config.subcommand]["trainer"]
        off = tuple(callback for flag, callback in TURNED_OFF_BY.items() if config[flag] is False)
        if off:
            callbacks = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
            kwargs["callbacks"] = [each for each in callbacks if each and not isinstance(each, off)]
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Refuse what is known not to work; then a fresh run moves an older one of the same name aside."""
        config = self.config.fit
        if config.ckpt_path is not None:
            found = check_readable(Path(config.ckpt_path), "--ckpt_path")
            check_resume(found, self.model.hparams, self.model.state_dict())
            if not {"optimizer_states", "lr_schedulers", "loops"} <= found.keys():
                raise ValueError(f"{config.ckpt_path} holds weights alone: start a new run with --model.init_from")
        elif not config.trainer.fast_dev_run:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            self.datamodule.train_dataloader(), self.datamodule.val_dataloader()
            if self.model.init_from:
                fitting_weights(self.model.model, self.model.init_from, self.model.hparams)
            move_aside(self.folder)


def run_name(residual: Namespace) -> str:
    """The strategy's class, and those of its options that are not the defaults: `BlockAttnRes-num_blocks=4`."""
    strategy = class_of(residual)
    defaults = {key: p.default for key, p in inspect.signature(strategy).parameters.items()}
    options = residual.get("init_args") or Namespace()
    changed = [f"{key}={value}" for key, value in vars(options).items() if value != defaults.get(key)]
    return re.sub(r"[^\w=.,-]", "", "-".join([strategy.__name__, *changed]))


def substitute(config: Any, folder: str) -> Any:
    """Every "{run}" in the strings of a config becomes the run's folder."""
    if isinstance(config, str):
        return config.replace("{run}", folder)
    if isinstance(config, Namespace):
        return Namespace(**{key: substitute(value, folder) for key, value in vars(config).items()})
    if isinstance(config, list):
        return [substitute(value, folder) for value in config]
    return config


def find_checkpoint(folder: Path, which: str) -> Path:
    """A readable checkpoint: `<folder>/checkpoints/<which>.ckpt` for "last" and "best", else the path `which`.

    Raises:
        ValueError: it does not exist, or cannot be read.
    """
    named = which in ("last", "best")
    path = folder / "checkpoints" / f"{which}.ckpt" if named else Path(which)
    if named and not path.exists():
        others = sorted(str(p.parents[1]) for p in folder.parent.glob(f"*/checkpoints/{which}.ckpt"))
        hint = f"; runs that have one: {', '.join(others)} (choose with --name)" if others else ""
        raise ValueError(f"--ckpt_path {which}: there is no {path}{hint}")
    check_readable(path, f"--ckpt_path {which}")
    return path


def check_readable(path: Path, flag: str) -> dict[str, Any]:
    """Before a run is touched: what the checkpoint holds, without its data. Raises ValueError."""
    if not path.exists():
        raise ValueError(f"{flag}: there is no {path}")
    try:
        found = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # whatever it holds, it is not ours
        raise ValueError(f"{flag}: {path} is not a checkpoint, or it is damaged") from error
    if not isinstance(found, dict) or not {"state_dict", "pytorch-lightning_version"} <= found.keys():
        raise ValueError(f"{flag}: {path} is not a checkpoint of Lightning")
    return found


@rank_zero_only
def move_aside(folder: Path) -> None:
    """Rename an existing run to `<folder>.1`, `.2`, ...: nothing is overwritten."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    rank_zero_info(f"{folder} was there: moved to {aside}. To continue a run, add --ckpt_path last.")


def explain(message: str, parser: LightningArgumentParser) -> str:
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


def options(parser: LightningArgumentParser) -> list[str]:
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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def concrete(base: type) -> set[type]:
    """All classes below `base` that have been imported and can be built."""
    below = {each for direct in base.__subclasses__() for each in {direct} | concrete(direct)}
    return {each for each in below if not inspect.isabstract(each)}


def fail(message: str) -> NoReturn:
    """Print one line and exit with code 2."""
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def quiet() -> None:
    """Leave out what Lightning prints that is no news about the run."""
    for message in (
        r".*LeafSpec.* is deprecated",
        r"The '\w+' does not have many workers",  # local shards need none
        "Checkpoint directory .* exists and is not empty",  # a resumed run
        "Couldn't infer the batch indices fetched from your dataloader",
        ".*`IterableDataset` has `__len__` defined",
    ):
        warnings.filterwarnings("ignore", message=message)
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    noise = re.compile("💡 Tip|Trainer already configured with model summary callbacks")
    rank_zero.addFilter(lambda record: not noise.search(record.getMessage()))


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    A ValueError raised by this package, or by Lightning, tells the user what to change: it is printed in one line, with
    exit code 2.
    Any other exception keeps its traceback.
    """
    quiet()
    try:
        CLI(args)
    except (ValueError, MisconfigurationException) as error:
        for each in (error, error.__cause__):  # the parser wraps what a component that may be null raises
            raised_in = Path(traceback.extract_tb(each.__traceback__)[-1].filename) if each else Path()
            if any(raised_in.is_relative_to(Path(package.__file__).parent) for package in (attnres_lit, lightning)):
                fail(" ".join(str(each).split()))
        raise
