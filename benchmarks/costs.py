"""Do measured costs pay? Steps that are decided by them against steps that are decided by the built-in ones.

    python benchmarks/costs.py [options of compile-fsdp bench]
"""

from __future__ import annotations

import sys
from functools import partial

from compile_fsdp.cli import main
from compile_fsdp.tools.bench.modes import MODES

BUDGET_MIB = 100  # of the model `compute`, which takes 135 without a budget

# At the top level, since the ranks import this file, too.
COMPARED = {
    f"{name}_{costs}": partial(MODES["compile"], costs=costs, **options)
    for name, options in (("default", {}), ("budget", {"memory_budget": BUDGET_MIB * 2**20}))
    for costs in ("constants", "measured")
}
MODES.update(COMPARED)

if __name__ == "__main__":
    modes = ["eager", *COMPARED] if "compute" in sys.argv else ["eager", *list(COMPARED)[:2]]
    sys.exit(main(["bench", "--modes", ",".join(modes), *sys.argv[1:]]))
