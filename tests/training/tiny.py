"""A tiny model, data in memory, and a quick Trainer."""

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from attnres_lit.model import TransformerConfig
from attnres_lit.residual import BlockAttnRes
from attnres_lit.training import LanguageModel, OptimConfig

VOCAB, TOKENS, BATCH = 31, 8, 4


class Tokens(LightningDataModule):
    """Rows of random tokens in a fixed order; a resumed run goes on with the batch after the last one."""

    def __init__(self, batches=24, val_rows=6, token_bytes=None):
        super().__init__()
        self.rows = torch.randint(VOCAB, (batches * BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        self.val_rows = val_rows
        self.taken = 0
        if token_bytes is not None:
            self.token_bytes = token_bytes

    def train_dataloader(self):
        return DataLoader(self.rows.roll(-self.taken * BATCH, 0), batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader(self.rows[: self.val_rows], batch_size=BATCH)

    def test_dataloader(self):
        return self.val_dataloader()

    def predict_dataloader(self):
        return self.val_dataloader()


def tiny_config(**changes):
    return TransformerConfig(**{"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 2} | changes)


def tiny_module(residual=BlockAttnRes, seed=0, optim=None, config=None, **options):
    torch.manual_seed(seed)
    optim = optim or OptimConfig(lr=1e-2, warmup_steps=4, total_steps=20)
    return LanguageModel(config or tiny_config(), residual, optim, **options)


def tiny_trainer(tmp_path, **options):
    quick = {
        "accelerator": "cpu",
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,  # None: the whole split
        "default_root_dir": tmp_path,
    }
    return Trainer(**quick | options)
