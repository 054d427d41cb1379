"""What watches a run: one file each."""

from attnres_lit.training.callbacks.last_checkpoint import LastCheckpoint

__all__ = ["LastCheckpoint"]
