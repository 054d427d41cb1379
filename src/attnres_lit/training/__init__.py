"""Training with Lightning."""

import logging
import warnings

from attnres_lit.training.module import LanguageModel
from attnres_lit.training.optim import OptimConfig

__all__ = ["LanguageModel", "OptimConfig"]

# What Lightning says at every start and no user can act on: its own use of a deprecated name, a hint at worker
# processes that local shards do not need, advertisements.
warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")
warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "💡 Tip" not in str(record.msg))
