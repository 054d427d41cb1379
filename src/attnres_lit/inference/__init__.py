"""How a trained model is used: generation, perplexity, a look inside. Needs no Lightning."""

from attnres_lit.inference.evaluate import Perplexity, perplexity
from attnres_lit.inference.generate import generate, stream
from attnres_lit.inference.load import Trained, load
from attnres_lit.inference.sampling import Sampling

__all__ = ["Perplexity", "Sampling", "Trained", "generate", "load", "perplexity", "stream"]
