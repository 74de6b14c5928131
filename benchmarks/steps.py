"""How long does a training step take, and how much memory, against the other ways to run FSDP2?

`compile-fsdp bench` on decoders of three sizes, one of them also with dropout, and with every mode; SimpleFSDP's where
torchtitan can be imported.

    PYTHONPATH=TORCHTITAN python benchmarks/steps.py [options of compile-fsdp bench]
"""

from __future__ import annotations

import importlib.util
import sys

from compile_fsdp.cli import main
from compile_fsdp.tools.bench.modes import MODES

if __name__ == "__main__":
    has_simple = importlib.util.find_spec("torchtitan") is not None
    modes = [mode for mode in MODES if has_simple or not mode.startswith("simple")]
    defaults = ["--model", "overhead,mid,dropout,compute", "--modes", ",".join(modes), "--rounds", "15"]
    sys.exit(main(["bench", *defaults, *sys.argv[1:]]))
