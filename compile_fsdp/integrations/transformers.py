"""A callback for transformers' `Trainer` and trainers derived from it."""

from __future__ import annotations

from typing import Any

from compile_fsdp.errors import MissingExtraError
from compile_fsdp.integrations.sharded import CompilesSharded

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError.of("transformers", extra="transformers") from error


class CompileFSDP(CompilesSharded, TrainerCallback):
    """Compiles the model when training begins, after the Trainer has sharded it.

    Use `Trainer(..., callbacks=[CompileFSDP()])` with TrainingArguments that set `fsdp=True` and not `torch_compile`.
    """

    remedy = "TrainingArguments(fsdp=True) has it shard with FSDP2, where there is an accelerator"

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.compile(kwargs["model"])

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.reshard(kwargs["model"])
