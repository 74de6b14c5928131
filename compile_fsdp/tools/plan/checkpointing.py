"""Activation checkpointing of the repeated layers of a model."""

from __future__ import annotations

import enum
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_fsdp.errors import EstimateError
from compile_fsdp.torch_compat.dispatch import OpOverload, attention_ops
from compile_fsdp.wrap import RepeatedBlocksPolicy

_PRODUCT = torch.ops.aten.mm.default


class Checkpoint(str, enum.Enum):
    """Tensors that the forward of a layer saves besides the layer's inputs."""

    NONE = "none"  # all that the backward needs; nothing is checkpointed
    FULL = "full"  # nothing
    SELECTIVE = "selective"  # results of attention and of matrix products 1, 3, 5, ..., as torchtitan's "op" mode saves
    MATMULS = "matmuls"  # results of attention and of all matrix products


def checkpoint_layers(model: nn.Module, how: Checkpoint) -> None:
    """Checkpoint the repeated layers of a model in place.

    Raises:
        EstimateError: the model has no repeated layers.
    """
    if how is Checkpoint.NONE:
        return
    layers = RepeatedBlocksPolicy().select(model, frozenset(), {})
    if not layers:
        raise EstimateError("expected a model with repeated layers to checkpoint, got none; use --checkpoint none")
    options: dict[str, Any] = {"use_reentrant": False}
    if how is not Checkpoint.FULL:
        options["context_fn"] = _save_odd_products if how is Checkpoint.SELECTIVE else _save_products
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, **options)


def _save_products() -> Any:
    return create_selective_checkpoint_contexts([_PRODUCT, *attention_ops])


def _save_odd_products() -> Any:
    counts: Counter[bool] = Counter()  # products so far, by whether the layer runs again

    def choose(context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is _PRODUCT:
            counts[context.is_recompute] += 1
        is_saved = op in attention_ops or (op is _PRODUCT and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
