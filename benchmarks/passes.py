"""What does each pass gain? Steps with one pass switched off, and with all of them, against eager FSDP2.

    python benchmarks/passes.py [options of compile-fsdp bench]
"""

from __future__ import annotations

import sys
from functools import partial

from compile_fsdp.cli import main
from compile_fsdp.passes import PASSES
from compile_fsdp.tools.bench.modes import MODES

NAMES = [each.__name__ for each in PASSES]
# At the top level, since the ranks import this file, too.
WITHOUT = {f"no_{name}": partial(MODES["compile"], disabled_passes=[name]) for name in NAMES}
MODES.update(WITHOUT, no_passes=partial(MODES["compile"], disabled_passes=NAMES))

if __name__ == "__main__":
    modes = ["eager", "compile", *WITHOUT, "no_passes"]
    sys.exit(main(["bench", "--model", "mid,compute", "--modes", ",".join(modes), *sys.argv[1:]]))
