"""Check torch's definition of an op, and add kernels for missing devices.

[Note: torch's definitions come first]
torch 2.11 to 2.15 define both ops with their functionalization and lowerings, eager FSDP2 runs on these definitions,
and a device plugin may register its own kernels. So this module only adds the kernel of a device without one, and
refuses a definition that differs. It does not repair it, because unrelated code in the process may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.torch_compat import dispatch, inductor
from compile_fsdp.torch_compat.dispatch import OpOverload

# Every device type that eager FSDP2 runs on. Out-of-tree devices use PrivateUse1.
DEVICE_KEYS = ("Meta", "CPU", "CUDA", "XPU", "HPU", "MTIA", "PrivateUse1")

_COMPOSITE_KEY = "CompositeExplicitAutograd"  # One kernel for every device key.

_REMEDY = "install torch>=2.11,<2.16 and import nothing that defines or changes this op before compile_fsdp"


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """Schema and kernels that this project needs of an op of torch."""

    name: str  # `namespace::op`; the overload is always the default overload
    signature: str  # arguments and returns as torch prints them, alias annotations included
    kernel: Callable[..., object] | None = None  # for devices without one; None: only torch can define it

    @property
    def schema(self) -> str:
        return self.name + self.signature


def get_op(definition: OpDefinition) -> OpOverload:
    """Return the op without checking its schema.

    Raises:
        OpDefinitionError: torch does not define the op.
    """
    namespace, name = definition.name.split("::")
    op: OpOverload | None = getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)
    if op is None:
        raise OpDefinitionError(f"expected the op {definition.schema}, found none; {_REMEDY}")
    return op


def ensure_definition(definition: OpDefinition, library: torch.library.Library | None = None) -> None:
    """Check the op's schema, add kernels of missing devices, and mark its side effect. A second call adds nothing.

    Args:
        definition: The definition that this project needs.
        library: Owner of the added kernels, which vanish when it is collected. None if there is no kernel to add.
    Raises:
        OpDefinitionError: The schema differs, or a kernel is missing that only torch can define.
    """
    op = get_op(definition)
    found_schema = str(op._schema)
    if found_schema != definition.schema:
        raise OpDefinitionError(f"expected the op {definition.schema}, found {found_schema}; {_REMEDY}")
    missing = [key for key in (*DEVICE_KEYS, "Functionalize") if not _has_kernel(definition.name, key)]
    if unavailable := [key for key in missing if definition.kernel is None or key == "Functionalize"]:
        raise OpDefinitionError(
            f"expected {definition.name} to have kernels for every device and Functionalize, "
            f"found none for {', '.join(unavailable)}; {_REMEDY}"
        )
    for key in missing:
        assert library is not None, "a definition with a kernel to add comes with its owner"
        library.impl(definition.name.split("::")[1], definition.kernel, key)
    # Neither op returns anything, and the resize declares no write: without the mark, it would be dead code.
    torch.fx.has_side_effect(op)


def check_lowering(definition: OpDefinition) -> None:
    """Raise OpDefinitionError if Inductor, which this imports, has no lowering of the op."""
    if get_op(definition) not in inductor.inductor_lowerings.value:
        raise OpDefinitionError(f"expected an Inductor lowering of {definition.name}, found none; {_REMEDY}")


def _has_kernel(name: str, key: str) -> bool:
    # Fallbacks do not count, because the effect of a device plugin's catch-all fallback on this op is unknown.
    return dispatch.has_kernel(name, key) or (key in DEVICE_KEYS and dispatch.has_kernel(name, _COMPOSITE_KEY))
