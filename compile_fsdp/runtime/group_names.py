"""What graphs call process groups.

torch names a process group by how many were created before it. In a graph that number would be part of the code, and of
the keys of the caches: with one more group in front of the model's, nothing that is cached would be found, and ranks
whose groups were created at different times would compile different graphs.
"""

from __future__ import annotations

import itertools

from torch.distributed import ProcessGroup

from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.distributed import add_group_name


@at_run_time
def name_in_graphs(group: ProcessGroup) -> str:
    """A name of the process group, by how many others sharded models of this process have used before it."""
    names = (f"compile_fsdp:{number}" for number in itertools.count())
    return next(name for name in names if add_group_name(group, name))
