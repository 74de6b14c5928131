"""Compare the plan's peak memory with runs of torchtitan that others published, in GiB.

Each row has the settings of its source: sizes of the model and of the batch, ranks, parameter groups, checkpointing.
The sources publish the bytes that the allocator reserved (`reserved_bytes.all.peak`).

    python benchmarks/plan_published.py
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compile_fsdp.passes import COSTS
from compile_fsdp.tools.plan.models import PRESETS, Checkpoint, build_from_config
from compile_fsdp.tools.plan.report import Figures, read_figures
from compile_fsdp.tools.plan.trace import Network, Settings, trace_step

TABLES = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
BUCKETING = "torchtitan, pull request 1881"
FULL_RECOMPUTE = "torchtitan, pull request 3429"


class ChunkedLoss(nn.Module):
    """A language model whose head and loss run on one eighth of a sequence at a time."""

    def __init__(self, model: nn.Module, chunks: int = 8) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        parts = zip(hidden.chunk(self.chunks, dim=1), labels.chunk(self.chunks, dim=1), strict=True)
        return sum(checkpoint(self._loss, *each, use_reentrant=False) for each in parts)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@dataclass(frozen=True)
class Groups:
    """The parameter groups of torchtitan's Llama.

    Attributes:
        has_parts: Whether the embedding and the head are groups, and the head stays unsharded, as since 2025. Before,
            both belonged to the root, and the last layer stayed unsharded.
    """

    has_parts: bool

    def select(self, root: nn.Module, ignored: Any, root_kwargs: Mapping[str, Any]) -> dict[nn.Module, dict[str, Any]]:
        layers = [module for module in root.modules() if type(module).__name__ == "LlamaDecoderLayer"]
        parts = [module for name, module in root.named_modules() if name.endswith(("embed_tokens", "lm_head"))]
        chosen = [*layers, *parts] if self.has_parts else layers
        return {module: {"reshard_after_forward": module is not chosen[-1]} for module in chosen}


@dataclass(frozen=True)
class Run:
    """Settings of one or more published runs of the 8B model with sequences of 8192 tokens.

    Attributes:
        ranks: Number of ranks that the model is sharded over.
        batch: Sequences per rank.
        checkpoint: How the layers are checkpointed.
        groups: The parameter groups.
        is_chunked: Whether the loss runs in chunks.
    """

    ranks: int
    batch: int
    checkpoint: Checkpoint
    groups: Groups
    is_chunked: bool = False

    def build(self) -> tuple[nn.Module, Mapping[str, Any]]:
        model, batch = build_from_config(PRESETS["8B"], self.batch, 8192)
        return (ChunkedLoss(model) if self.is_chunked else model), batch

    @functools.cache  # noqa: B019  # a few runs, kept as constants
    def predict(self) -> Figures:
        settings = Settings(self.ranks, checkpoint=self.checkpoint)
        return read_figures(trace_step(self.build, settings, Network(COSTS["cuda"]), self.groups), "adamw")


OLD, NEW = Groups(has_parts=False), Groups(has_parts=True)
EIGHT, MANY = Run(8, 2, Checkpoint.SELECTIVE, OLD), Run(128, 2, Checkpoint.SELECTIVE, OLD)
PUBLISHED = [
    ("8 ranks, selective, eager", EIGHT, 82.4, TABLES),
    ("8 ranks, selective, compiled layers", EIGHT, 77.0, TABLES),
    ("128 ranks, selective, eager", MANY, 67.0, TABLES),
    ("128 ranks, selective, compiled layers", MANY, 62.0, TABLES),
    ("8 ranks, selective, eager", Run(8, 1, Checkpoint.SELECTIVE, NEW), 47.82, BUCKETING),
    ("64 ranks, selective, eager", Run(64, 1, Checkpoint.SELECTIVE, NEW), 31.41, BUCKETING),
    ("8 ranks, matmuls, compiled", Run(8, 1, Checkpoint.MATMULS, NEW, is_chunked=True), 52.44, FULL_RECOMPUTE),
    ("8 ranks, full, compiled", Run(8, 1, Checkpoint.FULL, NEW, is_chunked=True), 32.07, FULL_RECOMPUTE),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose settings contain this text")
    args = parser.parse_args()
    print("| 8B | B x S | shards and optimizer | step | peak | published | peak / published | seconds | source |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for settings, run, published, source in PUBLISHED:
        if args.only not in settings:
            continue
        start = time.perf_counter()
        found = run.predict()
        sizes = [each / 2**30 for each in (found.peak_bytes - found.step_bytes, found.step_bytes, found.peak_bytes)]
        cells = [settings, f"{run.batch} x 8192", *(f"{each:.1f}" for each in sizes), f"{published:.1f}"]
        cells += [f"{sizes[-1] / published:.2f}", f"{time.perf_counter() - start:.0f}", source]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
