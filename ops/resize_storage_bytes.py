"""`inductor.resize_storage_bytes_`: allocate or free an unsharded parameter's storage.

Dynamo emits the op for `tensor.untyped_storage().resize_(n)`, and its functionalization tracks the storage's size in
C++. Python can supply no part of it, so this module only checks it. Its schema declares no mutation.
"""

from __future__ import annotations

from compile_fsdp.ops.definition import DEVICE_KEYS, OpDefinition, ensure_definition, get_op

DEFINITION = OpDefinition(
    name="inductor::resize_storage_bytes_",
    signature="(Tensor variable, SymInt new_size) -> ()",
    kernels=dict.fromkeys((*DEVICE_KEYS, "Functionalize")),
)

resize_storage_bytes_ = get_op(DEFINITION)


def ensure() -> tuple[str, ...]:
    """Check the op; there is no dispatch key to add. See `ensure_definition`."""
    return ensure_definition(DEFINITION)
