"""How long does a training step take, and how much memory, against the other ways to run FSDP2?

Two gloo ranks train decoders of three sizes. The modes take turns in every round, so that what else the machine does
falls on all of them; a step is forward and backward, the slowest rank's. Peak memory is what one step allocates, at
most, over what there was before it, from the allocator's own events; collectives are those that the backend executed.

    python benchmarks/steps.py [--sizes overhead mid compute] [--modes eager block ...] [--rounds 15]
                               [--torchtitan PATH] [--json FILE]

Modes: `eager` is torch's FSDP2; `block` compiles each block before sharding it; `whole` compiles the sharded model,
with its graph breaks; `simple` is SimpleFSDP, from the checkout of torchtitan at PATH, `simple_bucket` the same with
all of Inductor's collective bucketing, `simple_block` with buckets of a block's size; `bound` is one model without
sharding, compiled; `compile_fsdp` is this project, `compile_fsdp_kept` with memory for all unsharded parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import compile_fsdp
from compile_fsdp.train.config import ModelConfig
from compile_fsdp.train.model import Transformer

RANKS = 2
STEPS_PER_TURN = 3


@dataclass(frozen=True)
class Size:
    model: ModelConfig
    batch: int
    seq_len: int


SIZES = {
    "overhead": Size(ModelConfig(dim=64, layers=8, heads=4, hidden=192), batch=1, seq_len=16),
    "mid": Size(ModelConfig(dim=256, layers=8, heads=4, hidden=704), batch=2, seq_len=128),
    "compute": Size(ModelConfig(dim=512, layers=6, heads=8, hidden=1408), batch=4, seq_len=128),
}


def _shard(model: Any, shard: Callable[[nn.Module], Any]) -> Any:
    for module in (*model.layers, model):
        shard(module)
    return model


def _eager(model: Any) -> Any:
    return _shard(model, fully_shard)


def _block(model: Any) -> Any:
    for block in model.layers:
        block.compile()
    return _shard(model, fully_shard)


def _whole(model: Any) -> Any:
    _shard(model, fully_shard).compile()
    return model


def _compile_fsdp(model: Any, **options: Any) -> Any:
    _shard(model, compile_fsdp.fully_shard).compile(backend="compile_fsdp", fullgraph=True, options=options)
    return model


def _compile_fsdp_kept(model: Any) -> Any:
    return _compile_fsdp(model, memory_budget=2 * _bytes(model))


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _bound(model: Any) -> Any:
    model.compile(fullgraph=True)
    return model


def _simple(model: Any, **options: Any) -> Any:
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    device = next(model.parameters()).device.type
    model = data_parallel(model, init_device_mesh(device, (dist.get_world_size(),)), mode="fully_shard")
    model.compile(fullgraph=True, options=options)
    return model


def _simple_bucket(model: Any) -> Any:
    return _simple(model, bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all")


def _simple_block(model: Any) -> Any:
    size_mb = _bytes(model.layers[0]) / 2**20

    def determine(bucket: int) -> float:
        return size_mb

    return _simple(
        model,
        bucket_all_gathers_fx="all",
        bucket_all_gathers_fx_bucket_size_determinator=determine,
        bucket_reduce_scatters_fx="all",
        bucket_reduce_scatters_fx_bucket_size_determinator=determine,
    )


MODES: dict[str, Callable[[Any], Any]] = {
    "eager": _eager,
    "block": _block,
    "whole": _whole,
    "simple": _simple,
    "simple_bucket": _simple_bucket,
    "simple_block": _simple_block,
    "bound": _bound,
    "compile_fsdp": _compile_fsdp,
    "compile_fsdp_kept": _compile_fsdp_kept,
}


@dataclass
class Result:
    """One mode at one size.

    Attributes:
        ratio: Median over the rounds of the time of a step by that of `eager` in the same round.
        spread: The lower and the upper quartile of these ratios.
        step_ms: Median time of a step.
        peak_mib: Most memory that one step allocates: the median of five, since gloo's threads may hold on to the last
            collective's tensors.
        collectives: Of one step, on one rank.
        first_step_s: The first step, with whatever is in the compilers' caches.
    """

    ratio: float
    spread: tuple[float, float]
    step_ms: float
    peak_mib: float
    collectives: int
    first_step_s: float


class Run:
    """One mode's model in training."""

    def __init__(self, mode: str, size: Size, rank: int) -> None:
        torch.manual_seed(0)
        self.model = MODES[mode](Transformer(size.model, size.seq_len))
        torch.manual_seed(1 + rank)
        self.tokens = torch.randint(0, size.model.vocab_size, (size.batch, size.seq_len + 1))

    def step(self) -> None:
        self.model(self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()).backward()
        self.model.zero_grad()

    def time(self, steps: int) -> float:
        """Seconds per step, of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = torch.tensor((time.perf_counter() - start) / steps)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()


def peak_bytes(run: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
        # gloo's threads let go of a collective's tensors some time after it is over, and report that to the profiler
        # under which it was launched. It must not be gone by then.
        dist.barrier()
        time.sleep(0.02)
    level = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def executed_collectives() -> int:
    """Collectives of this process so far, by torch's flight recorder."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
    return 1 + max((entry["record_id"] for entry in entries), default=-1)


def measure(size: Size, modes: list[str], rounds: int, rank: int) -> dict[str, Result]:
    torch._dynamo.reset()
    runs = {mode: Run(mode, size, rank) for mode in modes}
    first = {mode: run.time(1) for mode, run in runs.items()}
    for run in runs.values():
        run.time(2)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        order = modes if turn % 2 == 0 else modes[::-1]
        for mode in order:
            seconds[mode].append(runs[mode].time(STEPS_PER_TURN))
    results = {}
    for mode, run in runs.items():
        before = executed_collectives()
        run.step()
        collectives = executed_collectives() - before
        ratios = [mine / theirs for mine, theirs in zip(seconds[mode], seconds["eager"], strict=True)]
        lower, _, upper = statistics.quantiles(ratios, n=4)
        results[mode] = Result(
            ratio=statistics.median(ratios),
            spread=(lower, upper),
            step_ms=1000 * statistics.median(seconds[mode]),
            peak_mib=statistics.median(peak_bytes(run.step) for _ in range(5)) / 2**20,
            collectives=collectives,
            first_step_s=first[mode],
        )
    return results


def _serve(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100  # Modes share the code of the model.
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    if options.torchtitan is not None:
        sys.path.append(str(options.torchtitan))
    tables = {}
    for name in options.sizes:
        tables[name] = measure(SIZES[name], options.modes, options.rounds, rank)
        if rank == 0:
            print(_format(name, tables[name]), flush=True)
    if rank == 0 and options.json is not None:
        raw = {name: {mode: asdict(result) for mode, result in table.items()} for name, table in tables.items()}
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    dist.destroy_process_group()


def _format(name: str, table: dict[str, Result]) -> str:
    lines = [
        f"| {name} | step / eager | quartiles | ms | peak MiB | collectives | first step, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, result in table.items():
        lower, upper = result.spread
        lines.append(
            f"| `{mode}` | {result.ratio:.2f} | {lower:.2f} to {upper:.2f} | {result.step_ms:.1f} | "
            f"{result.peak_mib:.1f} | {result.collectives} | {result.first_step_s:.1f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="all whose packages there are, unless given")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each mode, at least 2")
    parser.add_argument("--torchtitan", type=Path, help="a checkout of torchtitan, for the modes simple*")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    options.modes = options.modes or [m for m in MODES if not m.startswith("simple") or options.torchtitan]
    if "eager" not in options.modes:
        options.modes.insert(0, "eager")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "4000"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, args=(f"{folder}/store", options), nprocs=RANKS)


if __name__ == "__main__":
    main()
