"""`inductor.resize_storage_bytes_`: allocate or free an unsharded parameter's storage.

Dynamo emits the op for `tensor.untyped_storage().resize_(n)`, and its functionalization tracks the storage's size in
C++. Python can supply no part of it, so this module only checks it. Its schema declares no mutation.
"""

from __future__ import annotations

from compile_fsdp.ops.definition import OpDefinition, get_op

DEFINITION = OpDefinition("inductor::resize_storage_bytes_", "(Tensor variable, SymInt new_size) -> ()")

resize_storage_bytes_ = get_op(DEFINITION)
