"""Training with Lightning."""

from attnres_lit.training.module import LanguageModel
from attnres_lit.training.optim import OptimConfig

__all__ = ["LanguageModel", "OptimConfig"]
