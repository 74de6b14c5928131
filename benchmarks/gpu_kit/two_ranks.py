"""Do two ranks on one device train compiled as they do eagerly? And how much communication runs beside compute?

Rows are those of the parity table, the most important first; each runs in processes of its own and says by how much it
differs from torch's eager FSDP2.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from compile_fsdp.tools import launch
from gpu_kit.common import batch, build_pair, parser, table, worst_difference
from helpers.ranks.devices import prepare

ROWS = [
    *(("even", "aot_eager"), ("even", "inductor"), ("reshard", "aot_eager"), ("bf16, reduced in fp32", "inductor")),
    *(("accumulate", "aot_eager"), ("checkpoint inside", "aot_eager"), ("cpu offload", "aot_eager")),
    *(("uneven", "inductor"), ("prefetch", "aot_eager"), ("frozen layers", "aot_eager"), ("keep", "aot_eager")),
    *(("two forwards", "aot_eager"), ("float8 gather", "aot_eager"), ("fp16", "aot_eager"), ("lora", "inductor")),
    *(("shared parameters", "aot_eager"), ("grad scaler", "aot_eager"), ("columns", "aot_eager")),
]


def _parity_row(row: str, inner_backend: str) -> str:
    from helpers.parity.check import check_parity
    from helpers.parity.features import FEATURES

    outcome = check_parity(FEATURES[row], inner_backend)
    differing = torch.tensor([float(len(outcome.differing)), outcome.worst])
    dist.all_reduce(differing, dist.ReduceOp.MAX)
    return f"{int(differing[0])} | {differing[1].item():.1e} | {', '.join(outcome.directions)}"


def _overlap() -> str:
    """The share of NCCL kernels' time in which another kernel runs, compiled and eager."""
    eager, ours = build_pair()
    lines = []
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
        if total:
            lines.append(f"\n{name}: {total / 1e6:.2f} ms of communication, {hidden / total:.0%} beside compute.")
    return "\n".join(lines)


def _one_step() -> str:
    eager, ours = build_pair(options={"inner_backend": "aot_eager"})
    for step in range(2):
        for model in (ours, eager):
            model(*batch(step)).backward()
    difference = worst_difference(ours, eager)
    return f"\nTwo steps without a report; largest difference of a gradient: {difference:.1e}."


def _serve(rank: int, what: str, device: str, row: int) -> str:
    os.environ["COMPILE_FSDP_TEST_DEVICE"] = device
    prepare(device, 0)
    if device == "cuda" and what == "sanitizer":
        # The sanitizer does not know NCCL's kernels. gloo reads CUDA memory as the host's in functional all-gathers
        # (torch 2.11.0), but this step issues none.
        dist.init_process_group("cpu:gloo,cuda:gloo")
    else:
        os.environ["NCCL_HOSTID"] = str(rank)  # or NCCL refuses two ranks on one GPU
        launch.join(torch.device(device))
    try:
        if what == "sanitizer":
            return _one_step()
        return _overlap() if what == "overlap" else _parity_row(*ROWS[row])
    finally:
        dist.destroy_process_group()


def _run_ranks(what: str, device: str, row: int) -> tuple[str, str]:
    """Run two ranks; return the first rank's result and the error."""
    try:
        return launch.run(2, _serve, what, device, row)[0], ""
    except (launch.RankError, launch.RankLost) as error:
        return "", str(error)


def _parity_table(device: str) -> int:
    at_once = max(1, (os.cpu_count() or 2) // 3)
    failures = []
    print(table(("row", "compiler", "tensors that differ", "largest difference", "graphs"), []), end="")
    with ThreadPoolExecutor(at_once) as pool:
        rows = pool.map(lambda i: _run_ranks("rows", device, i), range(len(ROWS)))
        for (row, inner_backend), (result, error) in zip(ROWS, rows, strict=True):
            print(f"| {row} | {inner_backend} | {'**failed** | |' if error else result} |", flush=True)
            if error:
                failures.append(f"\n{row}, {inner_backend}:\n\n```text\n{error[-5000:]}\n```")
    print("\n".join(failures))
    return int(bool(failures))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--what", choices=("rows", "overlap", "sanitizer"), default="rows")
    options = made.parse_args()
    if options.what == "rows":
        return _parity_table(options.device)
    if options.device != "cuda":
        print("On a GPU alone.")
        return 0
    if options.what == "sanitizer":
        os.environ["TORCH_CUDA_SANITIZER"] = "1"  # read when a rank imports torch
    result, error = _run_ranks(options.what, options.device, 0)
    print(f"**failed**\n\n```text\n{error[-5000:]}\n```" if error else result)
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
