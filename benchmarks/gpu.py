"""What does one card gain: step time, MFU, peak memory and kernels launched, for a Llama-like model in bfloat16?

    python benchmarks/gpu.py [--worlds fake8 fake64 nccl1] [--size 8b] [--modes eager block ...] [--layers 32]
                             [--rounds 2] [--json FILE] [--device cuda]

`fake8` and `fake64` are rank 0 of 8 and of 64 on the fake process group: shards of that size, gathered into full
parameters by one kernel each, and other collectives that take no time. `nccl1` is NCCL with one rank. The modes are
those of `compile-fsdp bench`, and `compile_graphs` with CUDA graphs; those of SimpleFSDP need torchtitan on PYTHONPATH.
Each runs in a process of its own, since a card holds one such model at a time, and the modes take turns in every round.
Any other device than `cuda` is a rehearsal with a tiny model, whose figures mean nothing: `cpu`, an accelerator that
torch knows, or with `tests/` on PYTHONPATH the emulated device (docs/contributing.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compile_fsdp.tools import launch
from compile_fsdp.tools.bench.llama import Decoder, ModelConfig, Transformer
from compile_fsdp.tools.bench.measure import Run, synchronize
from compile_fsdp.tools.bench.modes import MODES

MODES["compile_graphs"] = partial(MODES["compile"], **{"triton.cudagraphs": True})

WORLDS = {"fake8": 8, "fake64": 64, "nccl1": 1}  # ranks
SIZES = {
    "8b": Decoder(ModelConfig(dim=4096, layers=32, heads=32, hidden=14336, vocab_size=128256), batch=1, seq_len=4096),
    "1b": Decoder(ModelConfig(dim=2048, layers=16, heads=32, hidden=8192, vocab_size=128256), batch=1, seq_len=4096),
}
TINY = Decoder(ModelConfig(dim=64, layers=2, heads=4, hidden=192), batch=1, seq_len=16)
PEAK_FLOPS = 989e12  # bfloat16 without sparsity, data sheets of H100 SXM and H200 SXM
WARM_UP, STEPS = 3, 10


def parameter_count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config, seq_len=1).parameters())


def flops_per_step(size: Decoder) -> float:
    """FLOPs of forward and backward without recomputation, with full attention: PaLM (arXiv 2204.02311), appendix B."""
    config = size.model
    embedding = config.vocab_size * config.dim
    tokens = size.batch * size.seq_len
    return tokens * (6 * (parameter_count(config) - embedding) + 12 * config.layers * config.dim * size.seq_len)


def layers_that_fit(size: Decoder, memory: int) -> int:
    """Number of blocks that a card with `memory` bytes holds in every mode, including `bound`, which does not shard.

    A block has parameters and gradients, and keeps about 14 activations of the model's width and 4 of the hidden width.
    """
    config = size.model
    one, tokens = parameter_count(replace(config, layers=1)), size.batch * size.seq_len
    tables = 2 * config.vocab_size * config.dim
    block = 2 * 2 * (one - tables) + 2 * tokens * (14 * config.dim + 4 * config.hidden)
    logits = 3 * 4 * tokens * config.vocab_size  # float32: logits, their softmax and their gradient
    return max(1, min(config.layers, int((0.85 * memory - 2 * 2 * tables - logits) / block)))


def _measure(mode: str, world: str, size: Decoder, device: str) -> dict[str, Any]:
    if device == "emulated":
        from helpers.ranks.devices import prepare

        prepare(device, 0)
    target = torch.device(device)
    with _fake(WORLDS[world], target) if world.startswith("fake") else _alone(target):
        torch.set_default_dtype(torch.bfloat16)
        with target:
            run = Run(mode, size, rank=0)
        start = time.perf_counter()
        run.step()
        synchronize(target)
        first = time.perf_counter() - start
        for _ in range(WARM_UP):
            run.step()
        synchronize(target)
        start = time.perf_counter()
        for _ in range(STEPS):
            run.step()
        launched_s = (time.perf_counter() - start) / STEPS
        synchronize(target)
        seconds = (time.perf_counter() - start) / STEPS
        held = 0 if device == "cpu" else torch.get_device_module(target).memory_allocated()
        peak = held + run.peak_bytes()
        kernels = _kernels(run) if device == "cuda" else 0
    mfu = flops_per_step(size) / seconds / PEAK_FLOPS
    return {
        "ms": 1e3 * seconds,
        "tokens_per_s": size.batch * size.seq_len / seconds,
        "mfu": mfu,
        "launched_ms": 1e3 * launched_s,  # until the CPU has launched everything
        "peak_gib": peak / 2**30,
        "kernels": kernels,
        "first_step_s": first,
    }


@contextmanager
def _fake(ranks: int, device: torch.device) -> Iterator[None]:
    """A fake process group whose all-gathers are one kernel, as NCCL's; torch's copy to each rank's part in turn."""
    with launch.fake_world(ranks):
        op, group = torch.ops.c10d._allgather_base_.default, dist.group.WORLD.boxed()
        _, done = op(torch.empty(ranks, device=device), torch.empty(1, device=device), group)

        def gather(output: torch.Tensor, input: torch.Tensor, *_: object) -> tuple[torch.Tensor, object]:
            # Eager FSDP2 gathers in place: its input is the first rank's part of the output.
            parts = output.view(ranks, -1)
            parts[int(input.data_ptr() == output.data_ptr()) :].copy_(input.view(-1))
            return output, done

        library = torch.library.Library("c10d", "IMPL")
        library.impl("_allgather_base_", gather, device.type.upper())
        yield
        library._destroy()


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    launch.join(device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _kernels(run: Run) -> int:
    """The number of kernels that a step launches on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.step()
        torch.accelerator.synchronize()
    events = profile.profiler.kineto_results.events()
    kernels = [e for e in events if e.device_type() == torch.profiler.DeviceType.CUDA and not e.is_user_annotation()]
    return len(kernels)


def _start(mode: str, world: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one mode, from a process of its own; None if it fails, and the error is on stderr."""
    shape = ["--size", options.size, "--layers", str(options.layers)]
    arguments = ["--only", mode, world, *shape, "--device", options.device]
    command = [sys.executable, __file__, *arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="all whose packages there are, unless given")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="blocks; as many as fit, unless given")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each mode")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SIZES[options.size] if options.device == "cuda" else TINY
    if options.only:
        size = replace(size, model=replace(size.model, layers=options.layers))
        print(json.dumps(_measure(*options.only, size, options.device)))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a GPU that torch can use, got none; --device cpu rehearses with a tiny model")
    has_simple = importlib.util.find_spec("torchtitan") is not None
    modes = options.modes or [mode for mode in MODES if has_simple or not mode.startswith("simple")]
    if options.device == "cpu" and "compile_graphs" in modes:
        modes.remove("compile_graphs")  # CPUs have no CUDA graphs
    if options.layers is None:
        memory = torch.cuda.get_device_properties(0).total_memory if options.device == "cuda" else 2**34
        options.layers = layers_that_fit(size, memory)
    print(f"torch {torch.__version__}, {options.layers} blocks, {options.device}\n")
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for world in options.worlds:
        rows = tables[world] = {mode: [] for mode in modes}
        for _ in range(options.rounds):
            for mode in modes:
                if (figures := _start(mode, world, options)) is not None:
                    rows[mode].append(figures)
                    # A run that is cut off has told all that it knew.
                    print(f"{world}, {mode}: " + ", ".join(f"{n} {v:.4g}" for n, v in figures.items()), flush=True)
            print("\n" + _format(world, rows), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(tables, indent=1) + "\n")


def _format(world: str, table: dict[str, list[dict[str, Any]]]) -> str:
    columns = ("ms", "tokens_per_s", "mfu", "launched_ms", "peak_gib", "kernels")
    head = f"| {world} | " + " | ".join(columns) + " | ms of each round | first step of each round, s |"
    lines = [head, "| --- |" + " ---: |" * (len(columns) + 2)]
    for mode, rounds in table.items():
        if not rounds:
            lines.append(f"| `{mode}` | failed |" + " |" * (len(columns) + 1))
            continue
        median = (statistics.median(each[name] for each in rounds) for name in columns)
        cells = [f"{value:.4g}" for value in median]
        cells += [", ".join(f"{each[name]:.1f}" for each in rounds) for name in ("ms", "first_step_s")]
        lines.append(f"| `{mode}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
