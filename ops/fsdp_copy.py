"""`fsdp.copy_`: fill an unsharded parameter, written into the graph as a write.

It does what `Tensor.copy_` does. The difference is in tracing: functionalization turns `aten.copy_` into a
new value, and the storage that the runtime frees and refills in every step would stay without its data.

[Note: Inductor's fsdp.copy_ wants one dtype]
torch's own lowering (2.11 to 2.15) first promotes both arguments to a common dtype. Where that is not the
destination's (a bf16 parameter filled from f32), the promoted copy is written instead, and the parameter
keeps its old values, without an error. So whoever puts this op into a graph gives it data of the
destination's dtype.
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
    import torch.distributed.fsdp  # Defines the op. Imported later, it would collide with our definition.


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
    """Make the op complete and return the dispatch keys that were supplied. See `ensure_definition`.

    On torch 2.11 to 2.15 that is PrivateUse1 alone. It is supplied here, when a model is compiled, and not at
    import: a device plugin imported until then has registered its own kernel, which is kept.
    """
    return ensure_definition(DEFINITION, _LIBRARY)
