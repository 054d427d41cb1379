"""`last.ckpt`: when it is saved."""

from lightning.pytorch import Callback

from attnres_lit.training.callbacks import LastCheckpoint
from training.tiny import Tokens, tiny_module, tiny_trainer


class Saves(Callback):
    """Whether each save came after the validation of its step."""

    def __init__(self):
        self.validated, self.saves = 0, []

    def on_validation_end(self, trainer, pl_module):
        self.validated = trainer.global_step

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saves.append((trainer.global_step, self.validated == trainer.global_step))


def test_where_validation_is_due_it_is_saved_once_and_after(tmp_path):
    saves = Saves()
    options = {"max_steps": 9, "enable_checkpointing": True, "val_check_interval": 4, "limit_val_batches": None}
    tiny_trainer(tmp_path, callbacks=[saves, LastCheckpoint(str(tmp_path), 2)], **options).fit(tiny_module(), Tokens())
    assert saves.saves == [(2, False), (4, True), (6, False), (8, True), (9, False)]
