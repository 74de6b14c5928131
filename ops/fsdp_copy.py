"""`fsdp.copy_`: fill an unsharded parameter, as a write in the graph.

It computes `Tensor.copy_`, but traces differently. Functionalization turns `aten.copy_` into a new value, so the
storage that the runtime frees and refills in every step would stay without data.

[Note: Inductor's fsdp.copy_ wants one dtype]
torch's own lowering (2.11 to 2.15) first promotes both arguments to a common dtype. If that is not the destination's
dtype (a bf16 parameter filled from f32), the lowering writes the promoted copy instead of the parameter. The parameter
keeps its old values, without an error. So code that puts this op into a graph passes data of the destination's dtype.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from compile_fsdp.ops.definition import (
    DEVICE_KEYS,
    OpDefinition,
    ensure_definition,
    get_or_define_op,
    pass_through,
)
from compile_fsdp.torch_compat import inductor

if torch.distributed.is_available():
    import torch.distributed.fsdp  # Defines the op; a later import would collide with our definition.


def _copy(tensor: Tensor, data: Tensor) -> None:
    tensor.copy_(data)


def _lower_copy(tensor: object, data: object) -> object:
    # The lowering of the aten op converts, moves and broadcasts `data`, and writes to `tensor` itself.
    return inductor.inductor_lowerings()[torch.ops.aten.copy_.default](tensor, data)


def define_copy(name: str) -> OpDefinition:
    return OpDefinition(
        name=name,
        signature="(Tensor(a!) tensor, Tensor data) -> ()",
        kernels={**dict.fromkeys(DEVICE_KEYS, _copy), "Functionalize": pass_through(name)},
        lowering=_lower_copy,
    )


DEFINITION = define_copy("fsdp::copy_")

_LIBRARY = torch.library.Library("fsdp", "FRAGMENT")

copy_ = get_or_define_op(DEFINITION, _LIBRARY)


def ensure() -> tuple[str, ...]:
    """Complete the op and return the added dispatch keys. See `ensure_definition`.

    On torch 2.11 to 2.15 the only added key is PrivateUse1. It is added when a model is compiled, not at import, so
    that a device plugin imported in between keeps its own kernel.
    """
    return ensure_definition(DEFINITION, _LIBRARY)
