"""Models and batch sizes for bench."""

from __future__ import annotations

from dataclasses import dataclass

from compile_fsdp.tools.bench.llama import ModelConfig, Transformer
from compile_fsdp.torch_compat.nn import checkpoint_modules


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, the sequences per rank and step, the tokens of each, and whether each block is checkpointed."""

    model: ModelConfig
    batch: int
    seq_len: int
    is_checkpointed: bool = False

    def build(self) -> Transformer:
        """Build the model on the default device."""
        model = Transformer(self.model, self.seq_len)
        if self.is_checkpointed:
            checkpoint_modules(model, check_fn=lambda module: module in set(model.layers))
        return model


SIZES = {
    "overhead": Decoder(ModelConfig(dim=64, layers=8, heads=4, hidden=192), batch=1, seq_len=16),
    "mid": Decoder(ModelConfig(dim=256, layers=8, heads=4, hidden=704), batch=2, seq_len=128),
    "dropout": Decoder(ModelConfig(dim=256, layers=8, heads=4, hidden=704, dropout=0.1), batch=2, seq_len=128),
    "compute": Decoder(ModelConfig(dim=512, layers=6, heads=8, hidden=1408), batch=4, seq_len=128),
}
