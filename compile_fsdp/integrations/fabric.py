"""Lightning Fabric: compile the model that a `ModelParallelStrategy`'s `parallelize_fn` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.integrations.sharded import CompilesSharded


def compiled(
    parallelize_fn: Callable[[Any, DeviceMesh], nn.Module],
    *,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = True,
) -> Callable[[Any, DeviceMesh], nn.Module]:
    """Make a `parallelize_fn` that also compiles: `ModelParallelStrategy(compiled(shard), ...)`.

    Compile here because Fabric does not call callbacks at `setup_module`.

    Args:
        parallelize_fn: Shards a model over a mesh, as for `ModelParallelStrategy`.
        options: Options of the backend, see docs/options.md.
        fullgraph: Whether a graph break is an error.
    Returns:
        A function with the arguments of `parallelize_fn`. It raises AlreadyCompiledError, FSDP1Error or
        NotShardedError if `parallelize_fn` returns a model that is compiled, FSDP1 or not sharded.
    Raises:
        UnknownOptionError: an option does not exist or has a wrong value.
    """
    compiles = CompilesSharded(options=options, fullgraph=fullgraph)
    compiles.remedy = "the function given to compiled() calls fully_shard, and returns the model"

    def parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
        sharded = parallelize_fn(model, mesh)
        compiles.compile(sharded)
        return sharded

    return parallelize
