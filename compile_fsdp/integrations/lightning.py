"""A callback for the `Trainer` of the packages lightning and pytorch_lightning."""

from __future__ import annotations

from typing import Any

from compile_fsdp.errors import MissingExtraError
from compile_fsdp.integrations.sharded import CompilesSharded

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtraError.of("pytorch_lightning", extra="lightning") from error


class CompileFSDP(CompilesSharded, Callback):
    """Compiles the model that `configure_model` shards.

    `Trainer(strategy=ModelParallelStrategy(...), callbacks=[CompileFSDP()])`
    """

    remedy = "with ModelParallelStrategy, the LightningModule's configure_model calls fully_shard"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compile(pl_module)

    # Validation, test and prediction may run without a fit before them.
    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self.reshard(pl_module)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
