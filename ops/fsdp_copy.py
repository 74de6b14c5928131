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
import torch.distributed.fsdp  # defines the op
from torch import Tensor

from compile_fsdp.ops.definition import OpDefinition, get_op


def _copy(tensor: Tensor, data: Tensor) -> None:
    tensor.copy_(data)


DEFINITION = OpDefinition("fsdp::copy_", "(Tensor(a!) tensor, Tensor data) -> ()", kernel=_copy)

LIBRARY = torch.library.Library("fsdp", "FRAGMENT")

copy_ = get_op(DEFINITION)
