"""The two ops that open, fill and close a window, as the runtime and the passes need them."""

from compile_fsdp.ops.ensure import ensure_lowerings, ensure_ops
from compile_fsdp.ops.fsdp_copy import copy_
from compile_fsdp.ops.resize_storage_bytes import resize_storage_bytes_

__all__ = ["copy_", "ensure_lowerings", "ensure_ops", "resize_storage_bytes_"]
