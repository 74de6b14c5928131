"""A decoder-only transformer, and the sizes that bench trains.

It has RMSNorm, rotary positions, SwiGLU, and optionally tied embeddings and dropout.

Shapes: B sequences, T tokens, D = dim, H heads of width K, V = vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers that decide the shapes of a model's parameters."""

    dim: int  # width of the residual stream
    layers: int
    heads: int  # of a block; dim / heads is an even integer
    hidden: int  # width of a SwiGLU feed-forward
    vocab_size: int = 256  # one token value per byte
    tie_embeddings: bool = False  # whether the output projection is the embedding table
    dropout: float = 0.0  # share of attention weights, and of each half of a block's results, that training drops

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads) != 0:
            raise ValueError(f"expected dim to be a multiple of 2 * heads, got dim={self.dim}, heads={self.heads}")


class Rotary(nn.Module):
    """Rotates each pair of channels of a query or key by an angle that grows with its position.

    Source: Su et al., RoFormer (arXiv:2104.09864), with channel i paired with channel i + K / 2.
    """

    cos: Tensor  # (seq_len, K / 2), float32
    sin: Tensor  # (seq_len, K / 2), float32

    def __init__(self, head_dim: int, seq_len: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(seq_len), frequencies)
        # Derived from the shapes alone, hence no part of a checkpoint.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x`: (B, H, T, K), of any floating dtype, which the result keeps."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = Rotary(config.dim // config.heads, seq_len)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, dim = x.shape
        split: Tensor = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (B, H, T, K)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return out


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm layer; the unit that a trainer shards."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config, seq_len)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Transformer(nn.Module):
    """Predicts each next token of sequences of at most `seq_len` tokens; `forward` returns the loss."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, seq_len) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.layers:
            assert isinstance(block, Block)
            # Keeps the residual stream's variance independent of the depth.
            for projection in (block.attention.out, block.feed_forward.down):
                nn.init.normal_(projection.weight, std=0.02 * (2 * config.layers) ** -0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, () float32; `targets` follow `tokens`, both (B, T) int64."""
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, the sequences per rank and step, and the tokens of each."""

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
