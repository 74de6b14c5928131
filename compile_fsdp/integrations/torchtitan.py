"""torchtitan: compile the model that a config's `parallelize_fn` shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_fsdp.errors import AlreadyCompiledError, UnsupportedFeatureError
from compile_fsdp.integrations.sharded import CompilesSharded


def compiled(config: Any, *, options: Mapping[str, Any] | None = None, fullgraph: bool = True) -> Any:
    """Make a config's `Trainer` compile its model: `return compiled(llama3_8b())` in a config function.

    Args:
        config: A `torchtitan.trainer.Trainer.Config` with its `model_spec`. When the Trainer is built, its
            `training.disable_cuda_graphs` must be true and its `compile.components` must not contain "model".
        options: Options of the backend, see docs/options.md.
        fullgraph: Whether a graph break is an error.
    Returns:
        `config` itself, whose `model_spec` gets a `parallelize_fn` that compiles. It raises AlreadyCompiledError or
        UnsupportedFeatureError for wrong settings, and FSDP1Error or NotShardedError for a model without FSDP2.
    Raises:
        UnknownOptionError: an option does not exist or has a wrong value.
    """
    compiles = CompilesSharded(options=options, fullgraph=fullgraph)
    compiles.remedy = "the parallelize_fn of the config's model_spec calls fully_shard, as apply_fsdp_to_decoder does"
    parallelize_fn = config.model_spec.parallelize_fn

    def parallelize(model: nn.Module, *, training: Any, compile_config: Any, **others: Any) -> nn.Module:
        if compile_config.enable and "model" in compile_config.components:
            raise AlreadyCompiledError(
                f"expected compile.components without 'model', got {compile_config.components}; torchtitan would "
                "compile each block by itself: set compile.enable=False, or compile.components=['loss']"
            )
        if not training.disable_cuda_graphs:
            raise UnsupportedFeatureError(
                "expected training.disable_cuda_graphs=True: torchtitan would capture the whole step in a CUDA graph; "
                'set it, and options={"triton.cudagraphs": True} to capture the forward and the backward'
            )
        model = parallelize_fn(model, training=training, compile_config=compile_config, **others)
        compiles.compile(model)
        return model

    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)
    return config
