"""torch's ops of a window: allocate and free an unsharded parameter's storage, and fill it as a write in the graph.

`fsdp.copy_` computes `Tensor.copy_`, but traces differently. Functionalization turns `aten.copy_` into a new value, so
the storage that the runtime frees and refills in every step would stay without data. Dynamo emits
`inductor.resize_storage_bytes_` for `tensor.untyped_storage().resize_(n)`, and its functionalization tracks the
storage's size in C++.

[Note: torch's definitions come first]
torch 2.11 to 2.15 define both ops with their functionalization and lowerings, and eager FSDP2 runs on these
definitions. So this project only adds the kernel for devices outside of torch, and refuses a definition that differs.
It does not repair it, because unrelated code in the process may rely on it.

[Note: Inductor's fsdp.copy_ wants one dtype]
torch's own lowering (2.11 to 2.15) first promotes both arguments to a common dtype. If that is not the destination's
dtype (a bf16 parameter filled from f32), the lowering writes the promoted copy instead of the parameter. The parameter
keeps its old values, without an error. So code that puts this op into a graph passes data of the destination's dtype.
"""

from __future__ import annotations

import torch
import torch.distributed.fsdp  # defines fsdp.copy_
from torch import Tensor, fx

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.torch_compat.dispatch import has_kernel, op_schema

copy_ = torch.ops.fsdp.copy_.default
resize_storage_bytes_ = torch.ops.inductor.resize_storage_bytes_.default

# The schemas that this project needs. The schema of the resize declares no write.
SCHEMAS = {
    copy_: "fsdp::copy_(Tensor(a!) tensor, Tensor data) -> ()",
    resize_storage_bytes_: "inductor::resize_storage_bytes_(Tensor variable, SymInt new_size) -> ()",
}

REMEDY = "install torch>=2.11,<2.16 and import nothing that defines or changes this op before compile_fsdp"

_LIBRARY = torch.library.Library("fsdp", "FRAGMENT")


def ensure_ops() -> None:
    """Check the schemas of both ops, mark their side effects, and add a missing kernel; a second call adds nothing.

    Raises:
        OpDefinitionError: torch, or a library, defines an op differently than the runtime needs it.
    """
    for op, schema in SCHEMAS.items():
        if (found := op_schema(op)) != schema:
            raise OpDefinitionError(f"expected the op {schema}, found {found}; {REMEDY}")
        # Neither op returns anything, and the resize declares no write: without the mark, it would be dead code.
        fx.has_side_effect(op)
    # torch has a kernel for each device of its own. For another device, the kernel is added when a model is compiled,
    # not at import, so that a device plugin imported in between keeps its kernel. Fallbacks do not count, because the
    # effect of a plugin's catch-all fallback on this op is unknown.
    if not any(has_kernel("fsdp::copy_", key) for key in ("PrivateUse1", "CompositeExplicitAutograd")):
        _LIBRARY.impl("copy_", _copy, "PrivateUse1")


def _copy(tensor: Tensor, data: Tensor) -> None:
    tensor.copy_(data)
