"""Inductor's lowerings of the ops."""

from __future__ import annotations

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops.call_block import BLOCK_CALLS, run_part
from compile_fsdp.ops.collectives import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.ops.offload import fetch
from compile_fsdp.ops.windows import REMEDY, SCHEMAS
from compile_fsdp.torch_compat.dispatch import op_name
from compile_fsdp.torch_compat.inductor import hand_over_inputs, inductor_lowerings, register_collective_lowering


def ensure_lowerings() -> None:
    """Check that Inductor knows both ops of a window, and make it know the ops that `wait_tensor` awaits. Imports it.

    Raises:
        OpDefinitionError: A lowering is missing.
    """
    for op in SCHEMAS:
        if op not in inductor_lowerings.value:
            raise OpDefinitionError(f"expected an Inductor lowering of {op_name(op)}, found none; {REMEDY}")
    for op in BLOCK_CALLS:
        hand_over_inputs(op, f"{run_part.__module__}.{run_part.__name__}")
    for op in (all_gather_into_tensor, reduce_scatter_tensor, fetch):
        if op not in inductor_lowerings.value:
            register_collective_lowering(op)
