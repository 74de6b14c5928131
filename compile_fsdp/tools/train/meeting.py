"""Let ranks that have just started find each other at a key-value store that may hold keys of earlier ranks.

[Note: torchrun's store outlives its ranks]
The ranks that torchrun starts again after a failure meet at the same store as those before them
(https://github.com/pytorch/pytorch/issues/135712). `init_process_group` alone then reads addresses of dead processes:
it fails, or waits until its timeout. No variable that torchrun sets tells one start from the next on all hosts: a host
whose torchrun is new counts its restarts from 0. So rank 0 draws a name, and the others look for the rank 0 that
answers them; the process group keeps its keys under that name.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from compile_fsdp.tools.train.config import TrainError
from compile_fsdp.torch_compat.distributed import Store

_FIRST = "compile_fsdp/first"  # key at which rank 0 writes its name, over an earlier rank 0's
_PATIENCE_S = 1.0  # time until a rank looks for another rank 0
_REMEDY = "look for its error, or whether this host reaches its; if it only needs longer, raise --timeout-s"


def meet(store: Store, rank: int, size: int, limit_s: float) -> str:
    """Agree on a name that only ranks that were started together know. All of these ranks call it together.

    Args:
        store: A store that all ranks reach. See [Note: torchrun's store outlives its ranks].
        rank: Rank of this process.
        size: Number of ranks.
        limit_s: Seconds to wait for the others.
    Raises:
        TrainError: a rank does not start within the limit.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + limit_s
    if rank == 0:
        return _gather(store, own, size, limit_s)
    while (left_s := deadline - time.monotonic()) > 0:
        if not _is_set(store, [_FIRST], left_s):
            break
        name = store.get(_FIRST).decode()
        store.set(f"{name}/{rank}", own)
        if _is_set(store, [f"{name}/members"], min(left_s, _PATIENCE_S)):
            if own in json.loads(store.get(f"{name}/members")):
                return name
            time.sleep(min(left_s, _PATIENCE_S / 10))  # the name of an earlier rank 0
    raise TrainError(f"expected rank 0 to start within {limit_s:g} s, got nothing from it; {_REMEDY}")


def _gather(store: Store, name: str, size: int, limit_s: float) -> str:
    """On rank 0, wait for all other ranks, and confirm to each that this process is its rank 0."""
    store.set(_FIRST, name)
    keys = {rank: f"{name}/{rank}" for rank in range(1, size)}
    if not _is_set(store, list(keys.values()), limit_s):
        missing = ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
        raise TrainError(f"expected rank {missing} to start within {limit_s:g} s, got nothing from it; {_REMEDY}")
    store.set(f"{name}/members", json.dumps([store.get(key).decode() for key in keys.values()]))
    return name


def _is_set(store: Store, keys: list[str], limit_s: float) -> bool:
    """Whether all keys are there within the limit."""
    if not keys:
        return True
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # how a FileStore reports a timeout
        return False
    return True
