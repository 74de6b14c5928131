"""Run the checks of the GPU kit side by side, then its measurements alone, and report each as soon as it ends.

    bash benchmarks/gpu.sh OUT

Each step has a time limit. OUT gets gpu.md, and for each step a folder with its whole output and its compiler caches.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
        is_alone: Whether nothing else may run meanwhile, because the step measures time.
    """

    title: str
    command: tuple[str, ...]
    limit_s: float
    is_alone: bool = False


MODES = ("eager", "compile", "block", "bound", "compile_graphs")  # of `gpu.py`; "bound" is the model without sharding

STEPS = (
    Step("A ladder of small programs on one rank", ("gpu_kit/ladder.py",), 120),
    Step("Parity rows on two ranks of one device", ("gpu_kit/two_ranks.py",), 200),
    Step("20 steps with accumulation and evaluation, without and with CUDA graphs", ("gpu_kit/twenty_steps.py",), 120),
    Step("Overlap on two ranks of one device", ("gpu_kit/two_ranks.py", "--what", "overlap"), 120),
    Step("torch's CUDA sanitizer over a step", ("gpu_kit/two_ranks.py", "--what", "sanitizer"), 120),
    Step(
        "Figures of a Llama-like 1B",
        ("gpu.py", "--worlds", "fake8", "--size", "1b", "--rounds", "2", "--modes", *MODES),
        280,
        is_alone=True,
    ),
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
    together = [step for step in STEPS if not step.is_alone]
    alone = [[step] for step in STEPS if step.is_alone]
    failures = 0
    for steps in (together, *alone):
        with ThreadPoolExecutor(max(1, len(steps))) as pool:
            for step, result in zip(steps, pool.map(partial(_run, end=end, options=options), steps), strict=True):
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


def _run(step: Step, end: float, options: argparse.Namespace) -> str:
    """Run a step until its limit, or until `end` of the monotonic clock; its output, as Markdown, and how it ended."""
    limit_s = min(step.limit_s, end - time.monotonic())
    if limit_s < 5:
        return "not run: no time left\n"
    folder = options.out / f"step{STEPS.index(step)}"
    folder.mkdir(exist_ok=True)
    log, errors = folder / "out", folder / "err"
    command = [sys.executable, str(HERE.parent / step.command[0]), *step.command[1:], "--device", options.device]
    # A cache for each step. KINETO_LOG_LEVEL silences a line for each profile.
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "KINETO_LOG_LEVEL": "6", "GPU_KIT_OUT": str(folder)}
    start = time.monotonic()
    with log.open("w") as out, errors.open("w") as err:
        environment = {**os.environ, **settings}
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
    tail = "\n".join(errors.read_text().splitlines()[-60:])
    return f"{text}\n{how}\n\n```text\n{tail}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
