"""Run the steps of the GPU kit one after the other, each within its time, and write down what they say at once.

    bash benchmarks/gpu.sh OUT
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Step:
    """One part of the kit.

    Attributes:
        title: What it shows.
        command: A script of this folder or of `benchmarks/`, and its arguments; they get `--device`, too.
        limit_s: Seconds after which it is ended.
    """

    title: str
    command: tuple[str, ...]
    limit_s: float


MODES = ("eager", "compile", "block", "bound")  # of `compile-fsdp bench`; "bound" is the model without sharding

# The most important first: a machine may be lent for two minutes only.
STEPS = (
    Step("A step compiled with Inductor on one rank equals the eager one", ("gpu_kit/one_rank.py",), 120),
    Step("Parity rows on two ranks of one device, gloo", ("gpu_kit/two_ranks.py", "--backend", "gloo"), 120),
    Step("Figures of a Llama-like 1B", ("gpu.py", "--worlds", "nccl1", "--size", "1b", "--modes", *MODES), 200),
    Step("20 steps with accumulation and evaluation; CUDA graphs are refused", ("gpu_kit/twenty_steps.py",), 90),
    Step("Parity rows and overlap on two ranks of one device, NCCL", ("gpu_kit/two_ranks.py", "--backend", "nccl"), 90),
    Step("torch's CUDA sanitizer over a step", ("gpu_kit/two_ranks.py", "--backend", "gloo", "--sanitizer"), 60),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.md and of the compilers' caches")
    parser.add_argument("--device", default="cuda", help="cpu or emulated: a rehearsal with tiny models")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds for all steps together")
    options = parser.parse_args()
    report = options.out / "gpu.md"
    report.write_text(_head(options.device))
    end = time.monotonic() + options.limit_s
    failures = 0
    for step in STEPS:
        left_s = min(step.limit_s, end - time.monotonic())
        result = _run(step, left_s, options) if left_s > 5 else "not run: no time left\n"
        failures += "**failed" in result
        with report.open("a") as file:
            file.write(f"\n## {step.title}\n\n{result}")
            file.flush()
            os.fsync(file.fileno())
        print(f"{step.title}:\n{result}", flush=True)
    return 1 if failures else 0


def _head(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return f"# compile_fsdp on {name}\n\n{time.strftime('%Y-%m-%d')}, {versions}.\n"


def _run(step: Step, limit_s: float, options: argparse.Namespace) -> str:
    """What a step prints, which is Markdown, and how it has ended."""
    log, errors = options.out / "step.out", options.out / "step.err"
    command = [sys.executable, str(HERE.parent / step.command[0]), *step.command[1:], "--device", options.device]
    # The caches of this run alone; and no line for each profile taken.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(options.out / "cache"), "KINETO_LOG_LEVEL": "6"}
    start = time.monotonic()
    with log.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.wait()
    seconds = time.monotonic() - start
    text = log.read_text()
    if code == 0:
        return f"{text}\n{seconds:.0f} s.\n"
    how = f"**failed**: ended after {seconds:.0f} s" if code is None else f"**failed** with exit status {code}"
    tail = "\n".join(errors.read_text().splitlines()[-25:])
    return f"{text}\n{how}\n\n```text\n{tail}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
