"""Lightning's Trainer on two ranks: one scenario, eager and compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import compile_fsdp
from compile_fsdp.integrations.lightning import CompileFSDP
from helpers.models.reference import Stack
from helpers.parity.trainers import Comparison, Trained, compare_resumed, compare_trained, run_scenario, train_both
from helpers.parity.twins import AOT_EAGER


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = Stack()
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=mesh)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    compiled: bool,
    options: dict[str, Any] = AOT_EAGER,
    validate: bool = False,
    resumed_from: str | None = None,
    rows: int = 32,
    **settings: Any,
) -> Trained:
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    callbacks: list[Any] = [CompileFSDP(options=options)] if compiled else []
    if settings.get("enable_checkpointing"):
        callbacks.append(ModelCheckpoint(f"saved_{compiled}", save_top_k=-1, save_on_train_epoch_end=True))
    trainer = pl.Trainer(**{
        "accelerator": "cpu",
        "devices": 2,
        "strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "max_steps": 3,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # that sampler shuffles
        "limit_val_batches": 2 if validate else 0,
    } | settings)
    batches = torch.randn(rows, 8, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    module = Module()
    loaders = {"train_dataloaders": DataLoader(batches, 4), "val_dataloaders": DataLoader(batches[:8], 4)}
    trainer.fit(module, **loaders, ckpt_path=resumed_from)
    return Trained.of(module.losses, module.model)


def resume() -> Comparison:
    """Repeat the second of two epochs from eager and compiled checkpoints."""
    settings: dict[str, Any] = {"max_steps": 4, "rows": 8, "enable_checkpointing": True}
    whole = {compiled: fit(compiled, **settings) for compiled in (False, True)}

    def start(saved_by: bool, resumed_by: bool) -> Trained:
        saved = str(next(Path(f"saved_{saved_by}").glob("*step=2*")))
        again = fit(resumed_by, max_steps=4, rows=8, resumed_from=saved)
        assert len(again.losses) == 2
        assert again.losses[0] == whole[False].losses[2]
        return again

    # Expect the first resumed run, because a resumed run gets different batches.
    return compare_resumed(compare_trained(whole[False], whole[True]), None, start)


SCENARIOS: dict[str, Callable[[], Comparison]] = {
    "verified": lambda: train_both(lambda compiled: fit(compiled, AOT_EAGER | {"verify": compiled})),
    "accumulation": lambda: train_both(lambda compiled: fit(compiled, accumulate_grad_batches=2)),
    "bf16-mixed": lambda: train_both(lambda compiled: fit(compiled, precision="bf16-mixed")),
    "clipped": lambda: train_both(lambda compiled: fit(compiled, gradient_clip_val=1.0)),
    "validation": lambda: train_both(lambda compiled: fit(compiled, validate=True, val_check_interval=2, max_steps=4)),
    "inductor": lambda: train_both(lambda compiled: fit(compiled, {})),
    "resumed": resume,
}

if __name__ == "__main__":
    run_scenario(SCENARIOS, sys.argv[1])
