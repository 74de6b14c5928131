"""Checks of the ops before compilation; repeated checks cost nothing."""

from __future__ import annotations

from compile_fsdp.ops import fsdp_copy, resize_storage_bytes
from compile_fsdp.ops.collectives import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.ops.definition import ensure_lowering
from compile_fsdp.ops.offload import fetch
from compile_fsdp.torch_compat.inductor import inductor_lowerings, register_collective_lowering


def ensure_ops() -> None:
    """Complete both ops: schema, dispatch kernels, functionalization, side-effect mark.

    Raises:
        OpDefinitionError: torch, or a library, defines an op differently than the runtime needs it.
    """
    fsdp_copy.ensure()
    resize_storage_bytes.ensure()


def ensure_lowerings() -> None:
    """Make Inductor know both ops, and the ops that `wait_tensor` awaits.

    Imports Inductor.

    Raises:
        OpDefinitionError: A lowering is missing that only torch can define.
    """
    ensure_lowering(fsdp_copy.DEFINITION)
    ensure_lowering(resize_storage_bytes.DEFINITION)
    for op in (all_gather_into_tensor, reduce_scatter_tensor, fetch):
        if op not in inductor_lowerings():
            register_collective_lowering(op)
