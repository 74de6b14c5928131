"""Does the plan agree with memory that others published? Predictions for runs that were not made here.

Each row has the settings of its source: sizes of the model and of the batch, ranks, groups, checkpointing. Figures are
GiB. The sources say what the process reserved (torchtitan prints `reserved_bytes.all.peak`). "hole" is what the
allocator cannot use, by hand: where the loss is not compiled, logits in bfloat16 are free after the forward, and the
space that they leave is too small for the backward's float32 tensors of the same shape.

    python benchmarks/plan_published.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from compile_fsdp.tools.planning.checkpointing import Checkpointing, Saved
from compile_fsdp.tools.planning.configs import PRESETS, build_model, token_batch
from compile_fsdp.tools.planning.estimates import estimate
from compile_fsdp.tools.planning.pipelines import WHOLE, Place, Stage, distinct_places, stage_batch
from compile_fsdp.wrap import CustomPolicy, Plan, plan

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL, SELECTIVE = Checkpointing(), Checkpointing(Saved.SOME_MATMULS)
FULL_COMPILED = Checkpointing(compiled=True)
COMPILED = Checkpointing(Saved.SOME_MATMULS, compiled=True)
MATMULS = Checkpointing(Saved.MATMULS, compiled=True)

TABLES = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
BUCKETING = "torchtitan, pull request 1881"
FULL_RECOMPUTE = "torchtitan, pull request 3429"
H200 = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"


class ChunkedLoss(nn.Module):
    """A language model whose head and loss run on one of eight parts of a sequence after the other."""

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


def one_root(model: nn.Module) -> Plan:
    """Embedding, norm and head together; the last layer stays unsharded, as torchtitan had it in 2024."""
    last = model.model.layers[-1]

    def choose(module: nn.Module) -> Any:
        return _is_layer(module) and {"reshard_after_forward": module is not last}

    return plan(model, CustomPolicy(choose), mp_policy=BF16)


def three_parts(model: nn.Module) -> Plan:
    """The embedding, and the head, which stays unsharded, are groups of their own, as in torchtitan since 2025."""
    inner = model.model if isinstance(model, ChunkedLoss) else model

    def choose(module: nn.Module) -> Any:
        if module is inner.lm_head:
            return {"reshard_after_forward": False}
        return _is_layer(module) or module is inner.model.embed_tokens

    return plan(model, CustomPolicy(choose), mp_policy=BF16)


def all_kept(stage: nn.Module) -> Plan:
    """Every group stays unsharded, as in torchtitan's pipelines."""
    policy = CustomPolicy(lambda module: _is_layer(module) and {"reshard_after_forward": False})
    return plan(stage, policy, mp_policy=BF16)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__ == "LlamaDecoderLayer"


@dataclass(frozen=True)
class Row:
    """A published run: `ranks` shard, each of `tp` times `pp` GPUs; GiB as published. `batch` is a microbatch's."""

    source: str
    settings: str
    published: float
    ranks: int
    batch: int
    how: Checkpointing
    groups: Callable[[nn.Module], Plan]
    preset: str = "8B"
    tp: int = 1
    seq_len: int = 8192
    chunked: bool = False
    float8: bool = False
    pp: int = 1
    microbatches: int = 1
    one_stream: bool = False  # SimpleFSDP's graphs allocate all in the stream that computes


ROWS = [
    Row(TABLES, "8B, 8 ranks, eager", 82.4, 8, 2, SELECTIVE, one_root),
    Row(TABLES, "8B, 8 ranks, compiled layers", 77.0, 8, 2, COMPILED, one_root),
    Row(TABLES, "8B, 8 ranks, compiled layers, float8", 76.8, 8, 2, COMPILED, one_root, float8=True),
    Row(TABLES, "8B, 128 ranks, eager", 67.0, 128, 2, SELECTIVE, one_root),
    Row(TABLES, "8B, 128 ranks, compiled layers", 62.0, 128, 2, COMPILED, one_root),
    Row(TABLES, "8B, 128 ranks, compiled layers, float8", 61.8, 128, 2, COMPILED, one_root, float8=True),
    Row(TABLES, "8B, 8 ranks, compiled, float8, full", 83.9, 8, 1, FULL_COMPILED, one_root, seq_len=32768, float8=True),
    Row(TABLES, "70B, 32 ranks, TP 8, float8, full", 71.9, 32, 16, FULL_COMPILED, one_root, "70B", 8, float8=True),
    Row(TABLES, "the same, asynchronous TP", 67.6, 32, 16, FULL_COMPILED, one_root, "70B", 8, float8=True),
    Row(TABLES, "405B, 8 ranks, TP 8, PP 8, float8, full", 82.5, 8, 4, FULL_COMPILED, all_kept, "405B", 8,
        float8=True, pp=8, microbatches=8),
    Row(BUCKETING, "8B, 8 ranks, eager", 47.82, 8, 1, SELECTIVE, three_parts),
    Row(BUCKETING, "8B, 64 ranks, eager", 31.41, 64, 1, SELECTIVE, three_parts),
    Row(BUCKETING, "8B, 4 ranks, TP 2, eager", 35.33, 4, 1, SELECTIVE, three_parts, tp=2),
    Row(FULL_RECOMPUTE, "8B, 8 ranks, matmuls", 52.44, 8, 1, MATMULS, three_parts, chunked=True, one_stream=True),
    Row(FULL_RECOMPUTE, "8B, 8 ranks, full", 32.07, 8, 1, FULL, three_parts, chunked=True, one_stream=True),
    Row(FULL_RECOMPUTE, "8B, 4 ranks, TP 2, matmuls", 30.92, 4, 1, MATMULS, three_parts, "8B", 2, 8192, True, True),
    Row(FULL_RECOMPUTE, "8B, 4 ranks, TP 2, full", 20.70, 4, 1, FULL, three_parts, "8B", 2, 8192, True, True),
    Row(H200, "8B, 32 ranks, compiled, float8", 47.96, 32, 2, COMPILED, three_parts, float8=True),
    Row(H200, "8B, 64 ranks, compiled, float8", 46.97, 64, 2, COMPILED, three_parts, float8=True),
]


def predict(row: Row, place: Place = WHOLE) -> dict[str, float]:
    """GiB: the peak, what all streams reserve, and activations."""
    model, batch = build_model(PRESETS[row.preset], row.how, row.tp, row.float8), token_batch(row.batch, row.seq_len)
    if row.chunked:
        model = ChunkedLoss(model)
    if place.stages > 1:
        shape = (row.batch, row.seq_len // row.tp, PRESETS[row.preset]["hidden_size"])
        batch = stage_batch(batch, place, torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        model = Stage(model, place)
    found = estimate(row.groups(model), batch, place=place).at(row.ranks)
    return {name: found[name] / 2**30 for name in ("peak", "reserved", "activations")}


def predict_largest(row: Row) -> dict[str, float]:
    """Of a pipeline, the figures of the stage that reserves most."""
    stages = (predict(row, place) for place in distinct_places(row.pp, row.microbatches))
    return max(stages, key=lambda found: found["reserved"])


def hole(row: Row) -> float:
    """GiB of a rank's logits in bfloat16."""
    if row.chunked:
        return 0.0
    return row.batch * row.seq_len * PRESETS[row.preset]["vocab_size"] / row.tp * 2 / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose settings have this in them")
    args = parser.parse_args()
    print("| settings | B x S | activations | peak | reserved | published | reserved / published | hole | source |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in (each for each in ROWS if args.only in each.settings):
        found = predict_largest(row)
        reserved = found["peak" if row.one_stream else "reserved"]
        cells = [row.settings, f"{row.batch} x {row.seq_len}"]
        cells += [f"{each:.1f}" for each in (found["activations"], found["peak"], reserved)]
        cells += [f"{row.published:.1f}", f"{reserved / row.published:.2f}", f"{hole(row):.1f}", row.source]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
