"""Names of process groups in graphs.

torch names a process group by the number of groups created before it. In a graph, this number would be part of the
cache keys, and ranks with different numbers of earlier groups would compile different graphs.
"""

from __future__ import annotations

import itertools

from torch.distributed import ProcessGroup

from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.distributed import add_group_name


@at_run_time
def name_in_graphs(group: ProcessGroup) -> str:
    """Return the group's name in graphs, numbered in the order of first use in this process."""
    names = (f"compile_fsdp:{number}" for number in itertools.count())
    return next(name for name in names if add_group_name(group, name))
