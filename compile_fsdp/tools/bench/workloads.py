"""The models that are trained, whose forward takes tokens and targets and returns the loss, and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.configs import read_config
from compile_fsdp.tools.train.config import PRESETS, ModelConfig
from compile_fsdp.tools.train.model import Transformer


class Workload(Protocol):
    """A model and its batch.

    Attributes:
        batch: Sequences per rank and step.
        seq_len: Tokens per sequence.
        vocab_size: Number of token values.
    """

    @property
    def batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def build(self) -> nn.Module:
        """The model on the default device: (B, T) tokens and (B, T) targets, both int64, to a scalar loss."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder with RMSNorm, SwiGLU and causal attention, the model of `compile-fsdp train`."""

    model: ModelConfig
    batch: int
    seq_len: int

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def build(self) -> nn.Module:
        return Transformer(self.model, self.seq_len)


SIZES = {
    "overhead": Decoder(ModelConfig(dim=64, layers=8, heads=4, hidden=192), batch=1, seq_len=16),
    "mid": Decoder(ModelConfig(dim=256, layers=8, heads=4, hidden=704), batch=2, seq_len=128),
    "compute": Decoder(ModelConfig(dim=512, layers=6, heads=8, hidden=1408), batch=4, seq_len=128),
    **{name: Decoder(preset.model, preset.batch_size, preset.seq_len) for name, preset in PRESETS.items()},
}


@dataclass(frozen=True, slots=True)
class CausalLM:
    """A language model of transformers, from its configuration alone.

    Attributes:
        config: Entries of its config.json.
    """

    config: dict[str, Any]
    batch: int
    seq_len: int

    @classmethod
    def read(cls, path: Path, batch: int, seq_len: int) -> CausalLM:
        """Raises:
        EstimateError: the file is no configuration of a model.
        """
        return cls(read_config(path), batch, seq_len)

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def build(self) -> nn.Module:
        """Raises:
        EstimateError: transformers cannot build a causal language model from the configuration.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.for_model(**self.config)
            return _Loss(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever a configuration makes a model's code raise
            message = str(error).partition("\n")[0]
            raise EstimateError(
                f"expected the configuration of a causal language model that transformers knows, got model_type "
                f"{self.config['model_type']!r}: {message}; correct the configuration"
            ) from error


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
