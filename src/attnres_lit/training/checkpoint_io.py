"""The checkpoint of one device and of DDP: a file that is replaced as a whole."""

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from attnres_lit.parallel.atomic import remove
from attnres_lit.parallel.checkpoint import read_full, write_file


class CheckpointFiles(TorchCheckpointIO):
    """Writes beside, syncs to the disk and renames; loads checkpoints of every layout.

    Addresses of other file systems (`s3://...`) are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replace the checkpoint of this name, a file or a folder, as a whole. Raises OSError."""
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_file(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The whole checkpoint; nothing is ever unpickled but tensors and plain values. Raises ValueError."""
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_full(path)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a folder, whole."""
        if _is_remote(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


def _is_remote(path: Any) -> bool:
    return "://" in str(path)
