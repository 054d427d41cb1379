"""Strategies under which every process holds a part of the training state, and saves and loads that part."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.optim import Optimizer

from attnres_lit.parallel.atomic import remove
from attnres_lit.parallel.checkpoint import describe, held_elsewhere, read_optimizers, read_weights, write
from attnres_lit.parallel.launch import EndsTogether
from attnres_lit.parallel.together import together

Base = ParallelStrategy if TYPE_CHECKING else object  # what it is mixed into


class ShardedCheckpoint(Base):
    """Checkpoints of a strategy whose processes hold parts: folders that any layout loads, see `checkpoint.py`.

    Stands before the strategy in the bases: `class Mine(ShardedCheckpoint, ModelParallelStrategy)`. The LightningModule
    holds this process's part of the model under global names, as plain tensors or DTensors, and each optimizer this
    process's parameters. Model and optimizers are filled in place, after setup; a checkpoint that the module refuses
    changes neither.
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The parts are known only then."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """By `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the weights where they are."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the state where it is."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder. All processes call it. Raises OSError on all of them."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage options: it writes to a file system")
        assert self.lightning_module is not None
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None  # absent: weights alone
        write(self.broadcast(str(filepath)), self.lightning_module, optimizers, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What a checkpoint holds, without its tensors; of the weights, not those that only other processes hold.

        Nothing is ever unpickled but tensors and plain values, whatever `weights_only` says.

        Raises:
            ValueError: there is no such checkpoint, it is damaged, or it is something else.
        """
        assert self.lightning_module is not None
        self._restored_from = self.broadcast(str(checkpoint_path))
        checkpoint = together(lambda: describe(self._restored_from))
        elsewhere = held_elsewhere(self.lightning_module.state_dict())
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in elsewhere}
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the weights of this process, from where `load_checkpoint` looked. Raises ValueError."""
        assert self.lightning_module is not None
        read_weights(self._restored_from, self.lightning_module.state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers of this process, from where `load_checkpoint` looked. Raises ValueError."""
        assert self.lightning_module is not None
        read_optimizers(self._restored_from, self.lightning_module, self.optimizers)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a folder, whole."""
        if self.is_global_zero:
            remove(Path(filepath))


class FullyShardedStrategy(ShardedCheckpoint, EndsTogether, ModelParallelStrategy):
    """Every process keeps a part of each parameter, of its gradient and its optimizer state (FSDP2).

    Processes differ in their data; `LanguageModel.configure_model` shards the model over them.

    Args:
        data_parallel_size: processes that share a model; null: all of them.
        timeout: seconds that a process waits for the others before it gives up; at the start, at least 60.

    Raises:
        ValueError: `data_parallel_size` is not the number of processes, or `timeout` is not above 0.
    """

    def __init__(self, data_parallel_size: int | None = None, timeout: float = 1800.0) -> None:
        self.asked = data_parallel_size
        super().__init__(data_parallel_size or 1, 1, timeout=timedelta(seconds=timeout))

    def check(self) -> None:
        """Raises ValueError: `data_parallel_size` is not the number of processes."""
        processes = self.num_nodes * self.num_processes
        if self.asked not in (None, processes):
            raise ValueError(f"data_parallel_size={self.asked} must be the number of processes, {processes}, or null")

    def setup_environment(self) -> None:
        """Start the processes, now that their number is known."""
        self.check()
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
