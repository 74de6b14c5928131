"""How long does a training step take, and how much memory, against the other ways to run FSDP2?

`compile-fsdp bench` on decoders of three sizes, one of them also with dropout, and with every mode; SimpleFSDP's where
torchtitan can be imported. `--record` adds the tables to this month's file of benchmarks/results, and writes the tables
of README.md and docs/ anew.

    PYTHONPATH=TORCHTITAN python benchmarks/steps.py [--record] [options of compile-fsdp bench]
"""

from __future__ import annotations

import importlib.util
import io
import os
import platform
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path

import torch

from compile_fsdp.cli import main
from compile_fsdp.tools.bench.modes import MODES

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """\
# A training step against the other ways to run FSDP2

Quartiles are those of the rounds' ratios; modes take turns; a step is forward and backward, the slowest rank's. First
steps are those of one process that compiles the modes one after another, with whatever is in the caches.
"""


class _Both(io.StringIO):
    """Keeps what it also writes to the standard output."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def _describe(arguments: list[str]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return (
        f"## {date.today()}\n\ntorch {torch.__version__}, Python {platform.python_version()}, {device}, "
        f"`OMP_NUM_THREADS={threads}`, load {os.getloadavg()[0]:.1f} before the first step.\n\n"
        f"Command: `python benchmarks/steps.py {' '.join(arguments)}`\n\n"
    )


def _run(arguments: list[str]) -> int:
    has_simple = importlib.util.find_spec("torchtitan") is not None
    modes = [mode for mode in MODES if has_simple or not mode.startswith("simple")]
    defaults = ["--model", "overhead,mid,dropout,compute", "--modes", ",".join(modes), "--rounds", "15"]
    options = [each for each in arguments if each != "--record"]
    if "--record" not in arguments:
        return main(["bench", *defaults, *options])
    section = _describe(options)
    with redirect_stdout(_Both()) as output:
        status = main(["bench", *defaults, *options])
    if status == 0:
        device = "gpu" if torch.cuda.is_available() else "cpu"
        path = ROOT / f"benchmarks/results/steps_{device}_{date.today():%Y%m}.md"
        page = path.read_text() if path.exists() else INTRODUCTION
        path.write_text(f"{page.rstrip()}\n\n{section}{output.getvalue().rstrip()}\n")
        subprocess.run([sys.executable, ROOT / "docs/figures.py"], check=True)
    return status


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
