"""The two ops that open, fill and close a window, and the one that hands gradients over in a graph."""

from compile_fsdp.ops.ensure import ensure_lowerings, ensure_ops
from compile_fsdp.ops.fsdp_copy import copy_
from compile_fsdp.ops.hand_over import Receiver, hand_over, issue_ticket
from compile_fsdp.ops.resize_storage_bytes import resize_storage_bytes_

__all__ = [
    "Receiver",
    "copy_",
    "ensure_lowerings",
    "ensure_ops",
    "hand_over",
    "issue_ticket",
    "resize_storage_bytes_",
]
