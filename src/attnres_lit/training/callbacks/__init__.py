"""What watches a run: one file each."""

from attnres_lit.training.callbacks.depth_dynamics import DepthDynamics
from attnres_lit.training.callbacks.depth_weights import DepthWeights
from attnres_lit.training.callbacks.last_checkpoint import LastCheckpoint
from attnres_lit.training.callbacks.predictions import Predictions
from attnres_lit.training.callbacks.progress import ProgressBar
from attnres_lit.training.callbacks.throughput import Throughput

__all__ = ["DepthDynamics", "DepthWeights", "LastCheckpoint", "Predictions", "ProgressBar", "Throughput"]
