"""Models and batch sizes for bench."""

from __future__ import annotations

from dataclasses import dataclass

from compile_fsdp.tools.bench.llama import ModelConfig, Transformer


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, and the number of sequences per rank and step and of tokens per sequence."""

    model: ModelConfig
    batch: int
    seq_len: int

    def build(self) -> Transformer:
        """Build the model on the default device."""
        return Transformer(self.model, self.seq_len)


SIZES = {
    "overhead": Decoder(ModelConfig(dim=64, layers=8, heads=4, hidden=192), batch=1, seq_len=16),
    "mid": Decoder(ModelConfig(dim=256, layers=8, heads=4, hidden=704), batch=2, seq_len=128),
    "dropout": Decoder(ModelConfig(dim=256, layers=8, heads=4, hidden=704, dropout=0.1), batch=2, seq_len=128),
    "compute": Decoder(ModelConfig(dim=512, layers=6, heads=8, hidden=1408), batch=4, seq_len=128),
}
