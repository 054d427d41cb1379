"""Lightning's strategy for sharded data parallelism."""

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy


class FullyShardedStrategy(ModelParallelStrategy):
    """Every process keeps a part of each parameter, of its gradient and its optimizer state (FSDP2).

    Processes differ in their data; `LanguageModel.configure_model` shards the model over them.

    Args:
        data_parallel_size: processes that share a model; null: all of them.
        timeout: seconds that a process waits for the others before it gives up.

    Raises:
        ValueError: `data_parallel_size` is not the number of processes, or `timeout` is not above 0.
    """

    def __init__(self, data_parallel_size: int | None = None, timeout: float = 1800.0) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        self.asked = data_parallel_size
        super().__init__(data_parallel_size or 1, 1, timeout=timedelta(seconds=timeout))

    def setup_environment(self) -> None:
        """Start the processes, now that their number is known."""
        processes = self.num_nodes * self.num_processes
        if self.asked not in (None, processes):
            raise ValueError(f"data_parallel_size={self.asked} must be the number of processes, {processes}, or null")
        self._data_parallel_size = processes
        super().setup_environment()
