"""`prepare`: call accelerate's `Accelerator.prepare`, then compile the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_fsdp.errors import AlreadyCompiledError, MissingExtraError
from compile_fsdp.integrations.sharded import CompilesSharded

try:
    from accelerate import Accelerator
    from accelerate.utils import DynamoBackend
except ImportError as error:
    raise MissingExtraError.of("accelerate", extra="accelerate") from error


def prepare(
    accelerator: Accelerator, *objects: Any, options: Mapping[str, Any] | None = None, fullgraph: bool = True
) -> Any:
    """Have accelerate shard the models among `objects`, and compile them.

    Args:
        accelerator: An Accelerator that shards with FSDP2 and has no `dynamo_backend`.
        *objects: Models, optimizers, data loaders and schedulers, as for `accelerator.prepare`.
        options: Options of the backend, see docs/options.md.
        fullgraph: Whether a graph break is an error.
    Returns:
        The result of `accelerator.prepare(*objects)`.
    Raises:
        AlreadyCompiledError: accelerate would compile the models; nothing is prepared.
        FSDP1Error: accelerate has sharded with FSDP1.
        NotShardedError: accelerate has sharded nothing, as on a CPU.
        UnknownOptionError: an option does not exist or has a wrong value.
    """
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise AlreadyCompiledError(
            f"expected an Accelerator that does not compile, found dynamo_backend {backend.value}; leave out "
            "dynamo_backend, dynamo_plugin and the environment variable ACCELERATE_DYNAMO_BACKEND"
        )
    compiles = CompilesSharded(options=options, fullgraph=fullgraph)
    compiles.remedy = (
        "FullyShardedDataParallelPlugin(fsdp_version=2) has it shard with FSDP2, where there is an accelerator"
    )
    prepared = accelerator.prepare(*objects)
    for each in prepared if len(objects) > 1 else [prepared]:
        if isinstance(each, nn.Module):
            compiles.compile(each)
    return prepared
