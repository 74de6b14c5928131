"""Models and batch sizes for bench; each forward maps tokens and targets to the loss."""

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
        """Build the model on the default device; its forward maps int64 tokens (B, T) and targets (B, T) to a loss."""


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
    """A causal language model of transformers, built from its configuration alone.

    Attributes:
        config: Entries of the model's config.json.
    """

    config: dict[str, Any]
    batch: int
    seq_len: int

    @classmethod
    def read(cls, path: Path, batch: int, seq_len: int) -> CausalLM:
        """Read a config.json; raise EstimateError if it is not the configuration of a model."""
        return cls(read_config(path), batch, seq_len)

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def build(self) -> nn.Module:
        """Build the model; raise EstimateError if transformers has no causal language model for `config`."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.for_model(**self.config)
            return _Loss(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
        except Exception as error:  # a model's code may raise anything for a wrong configuration
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
