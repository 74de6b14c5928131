"""Do two ranks on one device train compiled as they do eagerly? And how much communication runs beside compute?

Rows are those of the parity table, the most important first; each runs in processes of its own and says by how much it
differs from torch's eager FSDP2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

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


def _parity_row(row: str, inner_backend: str) -> None:
    from helpers.parity.check import check_parity
    from helpers.parity.features import FEATURES

    outcome = check_parity(FEATURES[row], inner_backend)
    differing = torch.tensor([float(len(outcome.differing)), outcome.worst])
    dist.all_reduce(differing, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{int(differing[0])} | {differing[1].item():.1e} | {', '.join(outcome.directions)}", flush=True)


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
    backend = f"cpu:gloo,cuda:{_backend(options)}" if device == "cuda" else backends_of(torch.device(device))
    dist.init_process_group(backend, store=dist.FileStore(options.store, 2), rank=rank, world_size=2)
    if options.what == "sanitizer":
        _one_step()
    elif options.what == "overlap":
        _overlap()
    else:
        _parity_row(*ROWS[options.row])
    dist.destroy_process_group()


def _backend(options: argparse.Namespace) -> str:
    # Not gloo: it reads CUDA memory as the host's in functional all-gathers, and the process ends (torch 2.11.0).
    # The sanitizer's step issues none, and the sanitizer does not know NCCL's kernels.
    return "gloo" if options.what == "sanitizer" else "nccl"


def _run_ranks(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, str, str]:
    """Run two ranks; how they ended, the first one's output, and both ranks' errors."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = []
        for rank in range(2):
            environment = {**os.environ, "COMPILE_FSDP_TEST_DEVICE": options.device, "PYTHONFAULTHANDLER": "1"}
            if options.device == "cuda" and _backend(options) == "nccl":
                environment["NCCL_HOSTID"] = str(rank)  # or NCCL refuses two ranks on one GPU
            if options.what == "sanitizer":
                environment["TORCH_CUDA_SANITIZER"] = "1"
            out, err = (stack.enter_context(open(f"{folder}/{kind}{rank}", "w")) for kind in ("out", "err"))
            own = ["--rank", str(rank), "--store", f"{folder}/store"]
            command = [sys.executable, *sys.argv, *arguments, *own]
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        codes: list[int] = []
        for process in ranks:
            try:
                codes.append(process.wait(10 if any(codes) else None))
            except subprocess.TimeoutExpired:  # the other rank has failed
                process.kill()
                codes.append(process.wait())
        output, *errors = (Path(folder, name).read_text() for name in ("out0", "err0", "err1"))
    failed = [code for code in codes if code != 0]
    return f"failed with exit status {failed[0]}" if failed else "", output, "\n".join(errors)


def _parity_table(options: argparse.Namespace) -> int:
    at_once = max(1, (os.cpu_count() or 2) // 3)
    failures = []
    print(table(("row", "compiler", "tensors that differ", "largest difference", "graphs"), []), end="")
    with ThreadPoolExecutor(at_once) as pool:
        rows = pool.map(lambda i: _run_ranks(options, ["--row", str(i)]), range(len(ROWS)))
        for (row, inner_backend), (failure, output, errors) in zip(ROWS, rows, strict=True):
            print(f"| {row} | {inner_backend} | {f'**{failure}** | |' if failure else output.strip()} |", flush=True)
            if failure:
                failures.append(f"\n{row}, {inner_backend}:\n\n```text\n{errors[-5000:]}\n```")
    print("\n".join(failures))
    return int(bool(failures))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--what", choices=("rows", "overlap", "sanitizer"), default="rows")
    made.add_argument("--row", type=int, help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--store", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.rank is not None:
        _serve(options.rank, options)
        return 0
    if options.what == "rows":
        return _parity_table(options)
    if options.device != "cuda":
        print("On a GPU alone.")
        return 0
    failure, output, errors = _run_ranks(options, [])
    print(output)
    if failure:
        print(f"{failure}\n\n```text\n{errors[-5000:]}\n```")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
