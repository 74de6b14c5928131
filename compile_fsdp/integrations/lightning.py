"""A callback for Lightning's `Trainer`, of the package lightning or of pytorch_lightning."""

from __future__ import annotations

from compile_fsdp.errors import MissingExtraError
from compile_fsdp.integrations.sharded import CompilesSharded

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtraError.of("pytorch_lightning", extra="lightning") from error


class CompileFSDP(CompilesSharded, Callback):
    """Compiles what `configure_model` has sharded.

    `Trainer(strategy=ModelParallelStrategy(...), callbacks=[CompileFSDP()])`
    """

    remedy = "with ModelParallelStrategy, the LightningModule's configure_model calls fully_shard"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compile(pl_module)

    # Runs without a fit before them.
    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reshard(pl_module)
