"""The configuration of a training run: the model's shape, the presets and the options."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TIMEOUT_S = 1800.0  # the default timeout of torch's gloo process groups


class TrainError(Exception):
    """A mistake in the options, the data or the checkpoint of a run; shown without a traceback."""


class Mode(enum.Enum):
    """How the model's forward and backward run."""

    EAGER = "eager"
    COMPILE = "compile"


class Precision(enum.Enum):
    """Data type of the gathered parameters and the activations; shards and optimizer state stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceChoice(enum.Enum):
    """Device to train on; `AUTO` takes the accelerators that torch finds, CUDA's or others, if there are any."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that decide the shapes of a model's parameters."""

    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of transformer blocks."""
    heads: int
    """Number of attention heads per block; `dim / heads` has to be an even integer."""
    hidden: int
    """Hidden width of a SwiGLU feed-forward."""
    vocab_size: int = 256
    """Number of token values; 256, one per byte, by default."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding table."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads) != 0:
            raise TrainError(
                f"expected dim to be a multiple of 2 * heads, got dim={self.dim}, heads={self.heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def parameter_count(self) -> int:
        """Number of parameters of a model of this shape."""
        attention = 4 * self.dim * self.dim
        feed_forward = 3 * self.dim * self.hidden
        norms = 2 * self.dim
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return self.layers * (attention + feed_forward + norms) + self.dim + tables


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's shape with a batch that suits it."""

    model: ModelConfig
    seq_len: int
    """Tokens per sequence."""
    batch_size: int
    """Sequences per rank and step."""
    learning_rate: float
    """AdamW's step size after the warmup."""


PRESETS: dict[str, Preset] = {
    # 0.87 M parameters: a step takes a fraction of a second on two CPU cores.
    "tiny": Preset(ModelConfig(dim=128, layers=4, heads=4, hidden=352), 128, 8, 3e-3),
    # 10.8 M parameters: some seconds per step on a CPU, a few milliseconds on a GPU.
    "small": Preset(ModelConfig(dim=384, layers=6, heads=6, hidden=1024), 256, 16, 1e-3),
    # 85.3 M parameters: for GPUs.
    "base": Preset(ModelConfig(dim=768, layers=12, heads=12, hidden=2048), 1024, 16, 6e-4),
}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Everything that one run depends on, besides the number of ranks."""

    model: ModelConfig
    seq_len: int
    """Tokens per sequence."""
    batch_size: int
    """Sequences per rank and step."""
    learning_rate: float
    """AdamW's step size after the warmup."""
    output: Path
    """Folder for loss.png and summary.json."""
    mode: Mode = Mode.COMPILE
    inner_backend: str | None = None
    """Dynamo backend that compiles the graphs in compile mode; None uses that of `compile_fsdp.Options`."""
    steps: int = 100
    """Optimizer steps since the start of training; a resumed run continues up to this number."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly to its full value."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient."""
    precision: Precision = Precision.FLOAT32
    device: DeviceChoice = DeviceChoice.AUTO
    seed: int = 0
    """Decides the initial parameters and the order of the data."""
    data: Path | None = None
    """A file or a folder; None takes the source text of the running Python's standard library."""
    checkpoint: Path | None = None
    """Folder to resume from and to save to; None does neither."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that a rank waits for the others: to start, in a collective, and before a graph first runs."""

    def __post_init__(self) -> None:
        positive = ("seq_len", "batch_size", "learning_rate", "steps", "grad_clip", "save_every", "timeout_s")
        offenders = {name: getattr(self, name) for name in positive if not getattr(self, name) > 0}
        if self.warmup_steps < 0:
            offenders["warmup_steps"] = self.warmup_steps
        if offenders:
            listed = ", ".join(f"{name}={value}" for name, value in offenders.items())
            raise TrainError(f"expected positive numbers, got {listed}")
        if self.inner_backend is not None and self.mode is not Mode.COMPILE:
            raise TrainError(
                "expected --mode compile with --inner-backend, got --mode eager; drop one of the two"
            )
