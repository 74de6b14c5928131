"""What does a step cost in less memory? Budgets for whole steps against the default and against checkpointed blocks.

    python benchmarks/memory_budget.py [options of compile-fsdp bench]
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_fsdp.cli import main
from compile_fsdp.tools.bench.modes import MODES
from compile_fsdp.wrap import plan

BUDGETS_MIB = (150, 100, 84, 68)


def _checkpointed(model: nn.Module) -> nn.Module:
    """Eager FSDP2 that computes each block again in the backward."""
    for group in plan(model, fix_shared=True).groups[:-1]:
        for block in group.modules:
            block.forward = partial(_run_checkpointed, block.forward)
    return MODES["eager"](model)


def _run_checkpointed(forward: Any, *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False)


# At the top level, since the ranks import this file, too.
BUDGETED = {f"budget_{mib}": partial(MODES["compile"], memory_budget=mib * 2**20) for mib in BUDGETS_MIB}
MODES.update(BUDGETED, checkpointed=_checkpointed)

if __name__ == "__main__":
    modes = ["eager", "checkpointed", "block", "compile", *BUDGETED]
    sys.exit(main(["bench", "--model", "compute", "--modes", ",".join(modes), *sys.argv[1:]]))
