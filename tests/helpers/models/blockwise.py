"""Shard a model block by block and compile it as one graph, as most tests do."""

from __future__ import annotations

from typing import Any

from torch import nn

import compile_fsdp


def shard_blocks(model: nn.Module, fully_shard: Any = compile_fsdp.fully_shard, **arguments: Any) -> Any:
    """Shard each block, then the root; return the model.

    Args:
        model: Its blocks are the modules in its lists of modules, or, without such a list, its children.
        fully_shard: The sharding function, torch's or ours.
        arguments: Arguments of every call.
    """
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    blocks = [block for parent in lists or [model] for block in parent.children()]
    for module in (*(block for block in blocks if list(block.parameters())), model):
        fully_shard(module, **arguments)
    return model


def compile_whole(model: nn.Module, **options: Any) -> Any:
    """Compile a model as one graph, with the backend's options; return the model."""
    model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    return model
