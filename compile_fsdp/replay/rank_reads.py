"""Whether a traced frame may depend on the rank that has traced it.

Dynamo computes ranks and coordinates in a mesh at trace time, and guards the graph by none of them. So a process of
another rank must not replay a frame that may have read one.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection
from types import CodeType

from compile_fsdp.replay.sources import KNOWN_FOLDERS

# Functions and methods of torch.distributed.
_READS = frozenset(
    ("get_rank", "get_local_rank", "get_node_local_rank", "get_group_rank", "get_global_rank", "get_coordinate")
)


def may_read_rank(traced: Collection[CodeType]) -> bool:
    """Return whether one of the code objects that Dynamo has traced may read its rank.

    Code of torch and of this project computes the same on all ranks, except for DTensor's, which `ModelReplay` knows by
    the parameters.
    """
    return any(not code.co_filename.startswith(KNOWN_FOLDERS) and _may_read_rank(code) for code in traced)


def _may_read_rank(code: CodeType) -> bool:
    if not _READS.isdisjoint(code.co_names):
        return True
    return "rank" in code.co_names and any(map(_calls_rank, dis.get_instructions(code)))


def _calls_rank(instruction: dis.Instruction) -> bool:
    """Return whether an instruction loads a method `rank`, a process group's; an attribute `rank` is guarded."""
    is_method = instruction.opname == "LOAD_METHOD"
    if instruction.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
        is_method = bool((instruction.arg or 0) & 1)
    return is_method and instruction.argval == "rank"
