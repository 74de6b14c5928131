"""At which rung does a small program stop working on this device? Each rung runs in a process of its own, side by side.

The last rungs train four steps with Inductor and compare losses and gradients with torch's eager FSDP2. CPUs have no
CUDA graphs, so that rung is left out there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.tools.bench.measure import synchronize
from gpu_kit.common import batch, build, parser, start_alone, table, worst_difference

LIMIT_S = 110.0  # of a rung


def _train(device: str, steps: int = 1, forward_only: bool = False, **compile_args: Any) -> None:
    """Train torch's eager FSDP2 and ours side by side; ours eagerly too, without arguments for `compile`.

    Raises:
        AssertionError: a loss differs by more than 1e-4 or a gradient by more than 1e-3 of its largest value.
    """
    eager, ours = build(torch_fully_shard), build(compile_fsdp.fully_shard)
    if compile_args:
        ours.compile(backend="compile_fsdp", fullgraph=True, **compile_args)
    rows = []
    for step in range(steps):
        start = time.perf_counter()
        loss = _step(ours, step, forward_only)
        synchronize(torch.device(device))
        seconds = time.perf_counter() - start
        expected = _step(eager, step, forward_only)
        difference = 0.0 if forward_only else worst_difference(ours, eager)
        rows.append((step, f"{loss:.6f}", f"{expected:.6f}", f"{difference:.1e}", f"{seconds:.3f}"))
        assert abs(loss - expected) <= 1e-4 * abs(expected), rows
        assert difference <= 1e-3, rows
        for model in () if forward_only else (ours, eager):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
            model.zero_grad()
    if steps > 1:
        print(table(("step", "loss, compiled", "loss, eager", "largest difference of a gradient", "seconds"), rows))
        directions = [report.direction for report in compile_fsdp.reports()]
        print(f"Graphs: {', '.join(directions)}.")
        assert directions == ["forward", "backward"], directions


def _step(model: nn.Module, step: int, forward_only: bool) -> float:
    with torch.set_grad_enabled(not forward_only):
        loss = model(*batch(step))
    if not forward_only:
        loss.backward()
    return float(loss.item())


def _aot_eager(device: str, **args: Any) -> None:
    _train(device, options={"inner_backend": "aot_eager"}, **args)


RUNGS: dict[str, Callable[[str], None]] = {
    "eager step through compile_fsdp.fully_shard": _train,
    "aot_eager forward": lambda device: _aot_eager(device, forward_only=True),
    "aot_eager step": _aot_eager,
    "Inductor forward": lambda device: _train(device, forward_only=True, options={}),
    "Inductor step": lambda device: _train(device, steps=4, options={}),
    "Inductor step in CUDA graphs": lambda device: _train(device, steps=4, mode="reduce-overhead"),
}


def _climb(rung: str, device: str) -> None:
    start_alone(device)
    RUNGS[rung](device)


def _rows(device: str, folder: str) -> Sequence[tuple[str, str, str, str]]:
    """By rung: its name, how it ended, its output, and its errors."""
    processes = {}
    for number, rung in enumerate(RUNGS if device != "cpu" else list(RUNGS)[:-1]):
        files = [f"{folder}/rung{number}.{kind}" for kind in ("out", "err")]
        with open(files[0], "w") as out, open(files[1], "w") as err:
            command = [sys.executable, *sys.argv, "--rung", rung]
            processes[rung] = (subprocess.Popen(command, stdout=out, stderr=err), *files)
    start, rows = time.monotonic(), []
    for rung, (process, *files) in processes.items():
        try:
            code = process.wait(max(1.0, LIMIT_S - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        texts = []
        for name in files:
            with open(name) as file:
                texts.append(file.read())
        rows.append((rung, "passed" if code == 0 else f"failed with exit status {code}", *texts))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rung", help="run this one, in this process")
    options = made.parse_args()
    if options.rung is not None:
        _climb(options.rung, options.device)
        return 0
    rows = _rows(options.device, os.environ.get("GPU_KIT_OUT", "."))
    print(table(("rung", "result"), [row[:2] for row in rows]))
    for rung, result, output, errors in rows:
        print(output)
        if result != "passed":
            print(f"{rung}:\n\n```text\n{errors[-6000:]}\n```\n")
    return int(any(result != "passed" for _, result, *_ in rows))


if __name__ == "__main__":
    sys.exit(main())
