"""What a run that starts from a Hugging Face checkpoint takes from it besides the weights: its sizes, its tokenizer."""

from jsonargparse import Namespace

from attnres_lit.checks import class_of
from attnres_lit.data.hf_tokenizer import HFTokenizer
from attnres_lit.model import huggingface


def follow_checkpoint(config: Namespace) -> None:
    """Complete a parsed config whose `model.init_from` is a folder of Hugging Face's; leave any other alone.

    The sizes in `model.config` become those of the checkpoint, and `data.tokenizer`, where there is none, its own.

    Raises:
        ValueError: the folder cannot be read, or holds a model that cannot be expressed; other sizes were asked for, or
            a tokenizer of another vocabulary.
    """
    sizes, path = config.get("model.config"), config.get("model.init_from")
    if not isinstance(sizes, Namespace) or not path or not huggingface.is_folder(path):
        return
    stored, _ = huggingface.read_config(path)
    for name, value in huggingface.follow(vars(sizes), stored, path).items():
        sizes[name] = value
    if config.data.tokenizer is None:
        config.data.tokenizer = Namespace(
            class_path=f"{HFTokenizer.__module__}.{HFTokenizer.__name__}", init_args=Namespace(path=path)
        )
    chosen, options = class_of(config.data.tokenizer), config.data.tokenizer.get("init_args") or Namespace()
    if (size := chosen(**vars(options)).vocab_size) != stored.vocab_size:
        raise ValueError(
            f"data.tokenizer={chosen.__name__} has {size} ids, the model in {path} {stored.vocab_size}: leave "
            "data.tokenizer null to use the one beside the weights"
        )
