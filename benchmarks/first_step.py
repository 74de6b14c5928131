"""How long does the first step take, with empty caches and after a restart?

For each mode and number of blocks, two gloo ranks start twice with one cache folder, empty at first. The time is that
of the first forward and backward, the slowest rank's, after imports and sharding; the counters are those of rank 0.

    python benchmarks/first_step.py [--modes block simple ...] [--size overhead] [--layers 8 32] 

The modes and sizes are those of `compile-fsdp bench`; those of SimpleFSDP need torchtitan on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.utils import counters

from compile_fsdp.tools.bench.measure import Run
from compile_fsdp.tools.bench.modes import MODES
from compile_fsdp.tools.bench.workloads import SIZES

RANKS = 2

COUNTERS = (
    ("aot_autograd", "autograd_cache_hit"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
    ("inductor", "fxgraph_cache_hit"),
    ("inductor", "fxgraph_cache_miss"),
    ("inductor", "fxgraph_cache_bypass"),
)


def _serve(rank: int, store: str, mode: str, size_name: str, layers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    size = SIZES[size_name]
    run = Run(mode, replace(size, model=replace(size.model, layers=layers)), rank)
    dist.barrier()
    start = time.perf_counter()
    run.step()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{seconds.item():.2f}", *(counters[group][name] for group, name in COUNTERS))
    dist.destroy_process_group()


def _start(mode: str, size: str, layers: int, cache: str) -> list[str]:
    """Seconds and counters of the first step of fresh processes, as text."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--only", mode, "--size", size, "--layers", str(layers)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return output.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["block", "bound", "compile"])
    parser.add_argument("--size", choices=SIZES, default="overhead")
    parser.add_argument("--layers", nargs="+", type=int, default=[8])
    parser.add_argument("--only", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_serve, args=(f"{folder}/store", options.only, options.size, options.layers[0]), nprocs=RANKS)
        return
    print(f"| {options.size} | blocks | start | first step, s | " + " | ".join(name for _, name in COUNTERS) + " |")
    print("| --- | ---: | --- | ---: |" + " ---: |" * len(COUNTERS))
    for layers in options.layers:
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm"):
                    row = _start(mode, options.size, layers, cache)
                    print(f"| `{mode}` | {layers} | {start} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
