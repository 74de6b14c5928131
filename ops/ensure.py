"""Checks of the ops before compilation; repeated checks cost nothing."""

from __future__ import annotations

from compile_fsdp.ops import fsdp_copy, resize_storage_bytes
from compile_fsdp.ops.call_block import BLOCK_CALLS, run_part
from compile_fsdp.ops.collectives import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.ops.definition import check_lowering, ensure_definition
from compile_fsdp.ops.offload import fetch
from compile_fsdp.torch_compat.inductor import hand_over_inputs, inductor_lowerings, register_collective_lowering


def ensure_ops() -> None:
    """Complete both ops: schema, dispatch kernels, functionalization, side-effect mark.

    Raises:
        OpDefinitionError: torch, or a library, defines an op differently than the runtime needs it.
    """
    # On torch 2.11 to 2.15 the only added kernel is that of PrivateUse1. It is added when a model is compiled, not at
    # import, so that a device plugin imported in between keeps its own kernel.
    ensure_definition(fsdp_copy.DEFINITION, fsdp_copy.LIBRARY)
    ensure_definition(resize_storage_bytes.DEFINITION)


def ensure_lowerings() -> None:
    """Check that Inductor knows both ops, and make it know the ops that `wait_tensor` awaits. Imports Inductor.

    Raises:
        OpDefinitionError: A lowering is missing.
    """
    check_lowering(fsdp_copy.DEFINITION)
    check_lowering(resize_storage_bytes.DEFINITION)
    for op in BLOCK_CALLS:
        hand_over_inputs(op, f"{run_part.__module__}.{run_part.__name__}")
    for op in (all_gather_into_tensor, reduce_scatter_tensor, fetch):
        if op not in inductor_lowerings.value:
            register_collective_lowering(op)
