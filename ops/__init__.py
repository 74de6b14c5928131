"""Custom ops: windows, collectives, blocks, gradient hand-over, hook points, packs and offloading."""

from compile_fsdp.ops.accumulate_gradient import accumulate_gradient
from compile_fsdp.ops.call_block import BLOCK_CALLS, run_block
from compile_fsdp.ops.collectives import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.ops.ensure import ensure_lowerings, ensure_ops
from compile_fsdp.ops.fsdp_copy import copy_
from compile_fsdp.ops.hand_over import hand_over, issue_ticket
from compile_fsdp.ops.hook_point import watch
from compile_fsdp.ops.offload import fetch, offload
from compile_fsdp.ops.packs import cat, split_with_sizes_copy
from compile_fsdp.ops.resize_storage_bytes import resize_storage_bytes_

__all__ = [
    "BLOCK_CALLS",
    "accumulate_gradient",
    "all_gather_into_tensor",
    "cat",
    "copy_",
    "ensure_lowerings",
    "ensure_ops",
    "fetch",
    "hand_over",
    "issue_ticket",
    "offload",
    "reduce_scatter_tensor",
    "resize_storage_bytes_",
    "run_block",
    "split_with_sizes_copy",
    "watch",
]
