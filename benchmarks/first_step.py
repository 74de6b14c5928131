"""How long does the first step take, with empty caches and after a restart?

For each mode and number of blocks, two gloo ranks start twice with one cache folder, empty at first. The time is that
of the first forward and backward, the slowest rank's, after imports and sharding; the counters are those of rank 0.

    python benchmarks/first_step.py [--modes block simple ...] [--size overhead] [--layers 8 32] [--checkpoint]

The modes and sizes are those of `compile-fsdp bench`; those of SimpleFSDP need torchtitan on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from compile_fsdp.tools import launch
from compile_fsdp.tools.bench.llama import SIZES, Decoder, Transformer
from compile_fsdp.tools.bench.measure import Run
from compile_fsdp.tools.bench.modes import MODES

RANKS = 2

COUNTERS = (
    ("aot_autograd", "autograd_cache_hit"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
    ("inductor", "fxgraph_cache_hit"),
    ("inductor", "fxgraph_cache_miss"),
    ("inductor", "fxgraph_cache_bypass"),
)


class Checkpointed(Decoder):
    """A decoder whose blocks recompute their activations in the backward."""

    def build(self) -> Transformer:
        model = super().build()
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        return model


def _first_step(rank: int, mode: str, size: Decoder, cache: str) -> tuple[float, list[int]]:
    """Seconds of the first step, and the counters of this rank."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    launch.join(torch.device("cpu"))
    run = Run(mode, size, rank)
    dist.barrier()
    start = time.perf_counter()
    run.step()
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    return seconds, [counters[group][name] for group, name in COUNTERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["block", "bound", "compile"])
    parser.add_argument("--size", choices=SIZES, default="overhead")
    parser.add_argument("--layers", nargs="+", type=int, default=[8])
    parser.add_argument("--checkpoint", action="store_true", help="of each block's activations")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"| {options.size} | blocks | start | first step, s | " + " | ".join(name for _, name in COUNTERS) + " |")
    print("| --- | ---: | --- | ---: |" + " ---: |" * len(COUNTERS))
    for layers in options.layers:
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm"):
                    chosen = SIZES[options.size]
                    kind = Checkpointed if options.checkpoint else Decoder
                    size = kind(replace(chosen.model, layers=layers), chosen.batch, chosen.seq_len)
                    found = launch.run(RANKS, _first_step, mode, size, cache)
                    row = [f"{max(seconds for seconds, _ in found):.2f}", *map(str, found[0][1])]
                    print(f"| `{mode}` | {layers} | {start} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
