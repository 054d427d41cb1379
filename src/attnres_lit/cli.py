"""The command line: `python -m attnres_lit {fit,validate,test,predict,prepare,plan} --config ...`, and `commands.py`.

LightningCLI, with what a run needs around it: a fixed folder per run, `--ckpt_path last`, and errors of one line.
"""

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
import torch.distributed as dist
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import attnres_lit
from attnres_lit.checks import check_config, class_of, explain
from attnres_lit.commands import COMMANDS
from attnres_lit.data.datamodule import TokenDataModule
from attnres_lit.parallel import FullyShardedStrategy, PipelineStrategy
from attnres_lit.parallel.checkpoint import consolidate
from attnres_lit.parallel.launch import Launcher, RankLost, chain
from attnres_lit.parallel.watch import say
from attnres_lit.planning import Planner, without_devices
from attnres_lit.retrofit import follow_checkpoint
from attnres_lit.runs import check_readable, claim, find_checkpoint, move_aside, run_name, substitute
from attnres_lit.training.checkpoint import check_resume, check_warm_start
from attnres_lit.training.checkpoint_io import CheckpointFiles
from attnres_lit.training.module import LanguageModel

TURNED_OFF_BY = {  # Lightning refuses these flags, or leaves them without effect, while such a callback is configured
    "enable_progress_bar": pl.callbacks.ProgressBar,
    "enable_checkpointing": pl.callbacks.Checkpoint,
    "enable_model_summary": pl.callbacks.ModelSummary,
}


class Trainer(Planner, pl.Trainer):
    """Lightning's Trainer, and subcommands that prepare data and plan a run."""

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
        """Write it, without the checkpoint that this run went on from: who uses it again starts anew."""
        self.config = self.config.clone()
        self.config.ckpt_path = None
        super().setup(trainer, pl_module, "fit")


class CLI(LightningCLI):
    """See the module docstring."""

    config: Any
    parser_class: type[LightningArgumentParser] = Parser

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            LanguageModel,
            TokenDataModule,
            trainer_class=Trainer,
            parser_class=self.parser_class,
            parser_kwargs={"prog": "attnres_lit", "version": attnres_lit.__version__, "allow_abbrev": False},
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            args=args,
        )

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Lightning's way for those of the trainer; the others are listed with them, and run by `main`."""
        super()._add_subcommands(parser, **kwargs)
        others = {name: Parser(description=str(command.__doc__)) for name, command in COMMANDS.items()}
        for name, its_parser in {"consolidate": consolidate_parser(), **others}.items():
            parser._subcommands_action.add_subcommand(name, its_parser, help=its_parser.description)  # pyrefly: ignore[missing-attribute]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, `prepare` and `plan`."""
        return LightningCLI.subcommands() | {name: {"model", "datamodule"} for name in ("prepare", "plan")}

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
        follow_checkpoint(config)
        check_config(config, self._parser(self.config.subcommand).get_defaults())
        if self.config.subcommand == "fit" and config.trainer.default_root_dir is None:
            raise ValueError("no config says how to train: start from one, for example --config configs/block.yaml")
        self.folder = Path(config.runs_dir) / (config.name or run_name(config.model.residual))
        torch.set_num_threads(config.num_threads)
        if self.config.subcommand == "plan":
            without_devices(config)
        elif self.config.subcommand != "prepare":
            config.weights_only = True
        if self.config.subcommand != "fit":
            config.trainer.logger = False  # the curves of the run stay those of its training
        if config.get("ckpt_path") is not None:
            path = find_checkpoint(self.folder, config.ckpt_path)
            self.checkpoint = check_readable(path, f"--ckpt_path {config.ckpt_path}")
            config.ckpt_path = str(path)
        elif config.model.init_from:
            check_readable(Path(config.model.init_from), "--model.init_from")

    def instantiate_classes(self) -> None:
        """With the run's folder in place of "{run}", which the saved config keeps: it may run under another name."""
        config = self.config[self.config.subcommand]
        asked, config.trainer = config.trainer, substitute(config.trainer, str(self.folder))
        if self.config.subcommand == "plan" or holds_parts(config.trainer.strategy):  # any size can be planned
            self.parser.add_instantiator(without_values, LanguageModel, prepend=True)  # pyrefly: ignore[deprecated]
        super().instantiate_classes()
        config.trainer = asked
        if isinstance(self.trainer.strategy, PipelineStrategy):
            data, model = self.datamodule, self.model
            self.trainer.strategy.cut(model.model, data.seq_len, data.batch_size, model.compiled)
        elif isinstance(self.trainer.strategy, FullyShardedStrategy):
            self.trainer.strategy.check()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Without the callbacks that a flag turns off; a checkpoint file is replaced as a whole."""
        config = self.config_init[self.config.subcommand]["trainer"]
        off = tuple(callback for flag, callback in TURNED_OFF_BY.items() if config[flag] is False)
        if off:
            callbacks = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
            kwargs["callbacks"] = [each for each in callbacks if each and not isinstance(each, off)]
        trainer = super().instantiate_trainer(**kwargs)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # unless a plugin or the strategy has its own
            trainer.strategy.checkpoint_io = CheckpointFiles()
        launcher = trainer.strategy.launcher
        if type(launcher) is _SubprocessScriptLauncher:  # that of DDP; our strategies have their own
            trainer.strategy._launcher = Launcher(
                launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
            )
        return trainer

    def before_fit(self) -> None:
        """Refuse what is known not to work; then a fresh run moves an older one of the same name aside."""
        config = self.config.fit
        if config.ckpt_path is not None:
            check_resume(self.checkpoint, self.model.hparams, self.model.state_dict())
            if not {"optimizer_states", "lr_schedulers", "loops"} <= self.checkpoint.keys():
                raise ValueError(f"{config.ckpt_path} holds weights alone: start a new run with --model.init_from")
        else:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            self.datamodule.train_dataloader(), self.datamodule.val_dataloader()
            if self.model.init_from:
                check_warm_start(self.model.model, self.model.init_from, self.model.hparams)
        if not config.trainer.fast_dev_run:
            self.take_folder(fresh=config.ckpt_path is None)

    @rank_zero_only
    def take_folder(self, fresh: bool) -> None:
        """Hold the run's folder, emptied for a fresh run."""
        self.claimed = claim(self.folder)
        if fresh and (aside := move_aside(self.folder)):
            rank_zero_info(f"{self.folder} was there: moved to {aside}. To continue a run, add --ckpt_path last.")

    @rank_zero_only
    def after_fit(self) -> None:
        """Let go of the folder."""
        if not self.config.fit.trainer.fast_dev_run:
            Path(self.claimed.lock_file).unlink(missing_ok=True)
            self.claimed.release()


def consolidate_parser() -> Parser:
    """`consolidate CKPT OUT [--overwrite]`."""
    description = "Write a checkpoint, a folder or a file, as a single file."
    parser = Parser(prog="attnres_lit consolidate", description=description, allow_abbrev=False)
    parser.add_argument("ckpt", type=str, help="The checkpoint, written by any number of processes.")
    parser.add_argument("out", type=str, help="The file: for a run on one device, validate, predict and sharing.")
    parser.add_argument("--overwrite", action="store_true", help="Replace the file if it is there.")
    return parser


def holds_parts(strategy: Any) -> bool:
    """Whether no process holds the whole model under a strategy, as parsed."""
    return isinstance(strategy, Namespace) and issubclass(class_of(strategy), ModelParallelStrategy)


def without_values(model_class: type[LanguageModel], *args: Any, **kwargs: Any) -> LanguageModel:
    """Build the model on meta: its strategy makes the part that a process keeps."""
    with torch.device("meta"):
        return model_class(*args, **kwargs)


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
    exit code 2. Any other exception keeps its traceback.
    """
    quiet()
    given = sys.argv[1:] if args is None else args
    try:
        if given[:1] == ["consolidate"]:  # it needs no trainer
            options = consolidate_parser().parse_args(given[1:])
            consolidate(**vars(options))
            print(options.out)
        elif given and given[0] in COMMANDS:
            COMMANDS[given[0]](given[1:])
        else:
            CLI(args)
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()  # left to the end of the process, its threads may abort a run that is done
    except RankLost as error:
        say(str(error))
        sys.exit(1)
    except (ValueError, MisconfigurationException) as error:
        for each in chain(error):  # the parser wraps what a component that it builds raises
            raised_in = Path(traceback.extract_tb(each.__traceback__)[-1].filename)
            if any(raised_in.is_relative_to(Path(package.__file__).parent) for package in (attnres_lit, lightning)):
                fail(" ".join(str(each).split()))
        raise
