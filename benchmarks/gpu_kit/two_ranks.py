"""Do two ranks on one device train compiled as they do eagerly? And how much communication runs beside compute?

Rows are those of the parity table, the most important first; each says what differs from torch's eager FSDP2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

import compile_fsdp
from compile_fsdp.tools.train.world import backends_of
from gpu_kit.common import batch, build_pair, parser, table, worst_difference
from helpers.ranks.devices import prepare

ROWS = [
    *(("even", "aot_eager"), ("even", "inductor"), ("reshard", "aot_eager"), ("bf16, reduced in fp32", "inductor")),
    *(("accumulate", "aot_eager"), ("checkpoint inside", "aot_eager"), ("cpu offload", "aot_eager")),
    *(("uneven", "inductor"), ("prefetch", "aot_eager"), ("frozen layers", "aot_eager"), ("keep", "aot_eager")),
    *(("two forwards", "aot_eager"), ("float8 gather", "aot_eager"), ("fp16", "aot_eager"), ("lora", "inductor")),
    *(("shared parameters", "aot_eager"), ("grad scaler", "aot_eager"), ("columns", "aot_eager")),
]


def _parity_rows() -> None:
    from helpers.parity.check import check_parity
    from helpers.parity.features import FEATURES

    if dist.get_rank() == 0:
        print(table(("row", "compiler", "tensors that differ", "largest difference", "graphs"), []), end="")
    for row, inner_backend in ROWS:
        torch._dynamo.reset()
        compile_fsdp.reset_reports()
        try:
            outcome = check_parity(FEATURES[row], inner_backend)
            differing = torch.tensor([float(len(outcome.differing)), outcome.worst])
            dist.all_reduce(differing, dist.ReduceOp.MAX)
            text = f"{int(differing[0])} | {differing[1].item():.1e} | {', '.join(outcome.directions)}"
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} | |"
        if dist.get_rank() == 0:
            print(f"| {row} | {inner_backend} | {text} |", flush=True)


def _overlap() -> None:
    """Print the share of NCCL kernels' time in which another kernel runs, compiled and eager."""
    eager, ours = build_pair()
    for name, model in (("eager", eager), ("compiled", ours)):
        for step in range(3):
            model(*batch(step)).backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            model(*batch(3)).backward()
            torch.cuda.synchronize()
        events = [event for event in profiled.profiler.kineto_results.events() if not event.is_user_annotation()]
        spans = [(event.start_ns(), event.end_ns(), "nccl" in event.name()) for event in events if event.device_type()]
        communication = [(a, b) for a, b, is_nccl in spans if is_nccl]
        compute = sorted((a, b) for a, b, is_nccl in spans if not is_nccl)
        total = sum(b - a for a, b in communication)
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in communication for c, d in compute)
        if dist.get_rank() == 0 and total:
            print(f"\n{name}: {total / 1e6:.2f} ms of communication, {hidden / total:.0%} beside compute.", flush=True)


def _one_step() -> None:
    eager, ours = build_pair(options={"inner_backend": "aot_eager"})
    for step in range(2):
        for model in (ours, eager):
            model(*batch(step)).backward()
    difference = worst_difference(ours, eager)
    if dist.get_rank() == 0:
        print(f"\nTwo steps without a report; largest difference of a gradient: {difference:.1e}.")


def _serve(rank: int, options: argparse.Namespace) -> None:
    device = options.device
    prepare(device, 0)
    backend = f"cpu:gloo,cuda:{options.backend}" if device == "cuda" else backends_of(torch.device(device))
    dist.init_process_group(backend, store=dist.FileStore(options.store, 2), rank=rank, world_size=2)
    if options.sanitizer:
        _one_step()
    else:
        if options.backend == "nccl":
            _overlap()
        _parity_rows()
    dist.destroy_process_group()


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    made.add_argument("--sanitizer", action="store_true", help="two steps under torch's CUDA sanitizer")
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--store", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.rank is not None:
        _serve(options.rank, options)
        return 0
    if options.device != "cuda" and (options.backend == "nccl" or options.sanitizer):
        print("On a GPU alone.")
        return 0
    store = f"{tempfile.mkdtemp()}/store"
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "COMPILE_FSDP_TEST_DEVICE": options.device, "TORCH_FR_BUFFER_SIZE": "2000"}
        if options.backend == "nccl":
            environment["NCCL_HOSTID"] = str(rank)  # or NCCL refuses two ranks on one GPU
        if options.sanitizer:
            environment["TORCH_CUDA_SANITIZER"] = "1"
        command = [sys.executable, *sys.argv, "--rank", str(rank), "--store", store]
        ranks.append(subprocess.Popen(command, env=environment))
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
