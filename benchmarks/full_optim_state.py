"""How much memory do the other ranks need while rank 0 builds the full optimizer state?

A model of 1e8 parameters, one of them an embedding of a third of all, is sharded over two gloo ranks and gets AdamW
state. Then each way of building the full state runs once in processes of its own: `optim_state_dict(full=True,
rank0_only=True, cpu_offload=True)`, and torch's `get_optimizer_state_dict` with `full_state_dict` and `cpu_offload`.
The figure is the peak resident memory of the process in the call, less the memory before the call. Linux only.

    python benchmarks/full_optim_state.py [--parameters 100000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import compile_fsdp
from compile_fsdp.state import optim_state_dict
from compile_fsdp.tools import launch
from compile_fsdp.torch_compat.distributed import local_tensor

WORLD_SIZE = 2
LIMIT = 1.3  # largest peak of another rank's memory, as a multiple of its sharded state
WAYS = ("compile_fsdp.state", "torch")
Row = tuple[int, int, int, float]  # rank, bytes of the sharded state, bytes on top of it, seconds


def build(parameters: int) -> nn.Module:
    """A sharded model: an embedding with a third of the given number of parameters, and square layers."""
    dim = 1024
    embedding = nn.Embedding(parameters // 3 // dim, dim)
    layers = [nn.Linear(dim, dim, bias=False) for _ in range((parameters - embedding.weight.numel()) // dim**2)]
    model = nn.Sequential(embedding, *layers)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for module in model:
        compile_fsdp.fully_shard(module, mesh=mesh)
    compile_fsdp.fully_shard(model, mesh=mesh)
    return model


def full_state(way: str, model: nn.Module, optim: torch.optim.Optimizer) -> Any:
    if way == "torch":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(model, optim, options=options)
    return optim_state_dict(model, optim, full=True, rank0_only=True, cpu_offload=True)


def resident_bytes(field: str) -> int:
    """A figure of /proc/self/status: VmRSS is the present resident memory, VmHWM its peak since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that the process keeps could hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")


def run_rank(rank: int, way: str, parameters: int) -> Row:
    torch.set_num_threads(1)
    launch.join(torch.device("cpu"))
    model = build(parameters)
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optim.step()
    optim.zero_grad()
    warm = nn.Linear(8, 8)
    compile_fsdp.fully_shard(warm)
    full_state(way, warm, torch.optim.AdamW(warm.parameters()))  # warm up: imports and connections
    sharded = sum(
        local_tensor(value).numel() * value.element_size()
        for entries in optim.state.values()
        for value in entries.values()
    )
    dist.barrier()
    reset_peak()
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    state = full_state(way, model, optim)
    seconds, extra = time.perf_counter() - start, resident_bytes("VmHWM") - before
    if rank == 0:
        count = sum(each["exp_avg"].numel() for each in state["state"].values())
        assert count == sum(parameter.numel() for parameter in model.parameters())
    else:
        assert not state or not state["state"]
    dist.barrier()
    dist.destroy_process_group()
    return rank, sharded, extra, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: dict[tuple[str, int], list[Row]] = {}
    for _ in range(options.rounds):
        for way in WAYS:
            for row in launch.run(WORLD_SIZE, run_rank, way, options.parameters):
                rows.setdefault((way, row[0]), []).append(row)
    print(f"torch {torch.__version__}, {options.parameters:.0e} parameters, {options.rounds} rounds; MiB")
    print(f"{'way':<20} {'rank':>4} {'sharded':>8} {'on top, most':>13} {'peak / sharded':>15} {'seconds':>8}")
    for (way, rank), group in sorted(rows.items()):
        sharded, extra = group[0][1], max(row[2] for row in group)
        seconds = min(row[3] for row in group)
        ratio = (sharded + extra) / sharded
        print(f"{way:<20} {rank:>4} {sharded / 2**20:>8.1f} {extra / 2**20:>13.1f} {ratio:>15.3f} {seconds:>8.2f}")
    worst = max((row[1] + row[2]) / row[1] for row in rows[WAYS[0], 1])
    print(f"rank 1: peak {worst:.3f} of its sharded state (limit {LIMIT})")


if __name__ == "__main__":
    main()
