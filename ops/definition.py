"""Compare an op that torch defines with what this project needs of it, and supply what is missing.

[Note: torch's definitions come first]
torch 2.11 to 2.15 define both ops, eager FSDP2 runs on the same definitions, and a device plugin may register
kernels of its own. So nothing that is there is replaced: a missing kernel is added, and a definition that
differs is refused by name instead of being repaired, because other code in the process may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.torch_compat import dispatch, inductor
from compile_fsdp.torch_compat.dispatch import OpOverload

Kernel = Callable[..., object]

# Every device type that eager FSDP2 runs on; PrivateUse1 is the one that out-of-tree devices use.
DEVICE_KEYS = ("Meta", "CPU", "CUDA", "XPU", "HPU", "MTIA", "PrivateUse1")

_COMPOSITE_KEY = "CompositeExplicitAutograd"  # One kernel for every device key.

_REMEDY = "install torch>=2.11,<2.16 and import nothing that defines or changes this op before compile_fsdp"


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """What this project needs of one op.

    Attributes:
        name: `namespace::op`; the overload is always the default one.
        signature: Arguments and returns as torch prints them, alias annotations included.
        kernels: Dispatch key to the kernel to supply where there is none. None: only torch can have it.
        lowering: Inductor lowering to supply where there is none. None: only torch can have it.
    """

    name: str
    signature: str
    kernels: Mapping[str, Kernel | None]
    lowering: Kernel | None = None


def find_op(name: str) -> OpOverload | None:
    namespace, op_name = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), op_name, None)
    return getattr(packet, "default", None)


def get_op(definition: OpDefinition) -> OpOverload:
    """Return the op, whatever its schema.

    Raises:
        OpDefinitionError: torch does not define it.
    """
    op = find_op(definition.name)
    if op is None:
        raise OpDefinitionError(f"expected the op {_schema(definition)}, found none; {_REMEDY}")
    return op


def get_or_define_op(definition: OpDefinition, library: torch.library.Library) -> OpOverload:
    """Return the op, whatever its schema; define it in `library` if there is none."""
    if find_op(definition.name) is None:
        library.define(_op_name(definition) + definition.signature)
    return get_op(definition)


def pass_through(name: str) -> Kernel:
    """A Functionalize kernel that leaves the op `name` in the trace as a write."""

    def kernel(*args: object) -> None:
        op = find_op(name)
        assert op is not None, f"{name} runs, so it is defined"
        with dispatch.below_functionalization():
            op(*(dispatch.unwrap_functional(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))

    return kernel


def ensure_definition(
    definition: OpDefinition, library: torch.library.Library | None = None
) -> tuple[str, ...]:
    """Check the op's schema and kernels, supply the missing kernels, and keep the op from being dead code.

    Args:
        definition: What is needed.
        library: Owner of the supplied kernels, which vanish when it is collected; None where there are none.
    Returns:
        The dispatch keys supplied by this call: none, the second time.
    Raises:
        OpDefinitionError: The schema differs, or a kernel is missing that only torch can have.
    """
    op = get_op(definition)
    found_schema = dispatch.op_schema(op)
    if found_schema != _schema(definition):
        raise OpDefinitionError(f"expected the op {_schema(definition)}, found {found_schema}; {_REMEDY}")
    missing = {key: kernel for key, kernel in definition.kernels.items() if not _has_kernel(definition, key)}
    if unavailable := [key for key, kernel in missing.items() if kernel is None]:
        raise OpDefinitionError(
            f"expected {definition.name} to have kernels for {', '.join(definition.kernels)}, "
            f"found none for {', '.join(unavailable)}; {_REMEDY}"
        )
    for key, kernel in missing.items():
        assert library is not None, "a definition with kernels to supply comes with their owner"
        library.impl(_op_name(definition), kernel, key)
    # Neither op returns anything, and the resize declares no write: unmarked, it would be dead code.
    torch.fx.has_side_effect(op)
    return tuple(missing)


def ensure_lowering(definition: OpDefinition) -> bool:
    """Check that Inductor has a lowering for the op, and supply it if not. Imports Inductor.

    Returns:
        Whether this call supplied it.
    Raises:
        OpDefinitionError: The lowering is missing and only torch can have it.
    """
    op = get_op(definition)
    if op in inductor.inductor_lowerings():
        return False
    if definition.lowering is None:
        raise OpDefinitionError(f"expected an Inductor lowering of {definition.name}, found none; {_REMEDY}")
    inductor.register_inductor_lowering(op, definition.lowering)
    return True


def _has_kernel(definition: OpDefinition, key: str) -> bool:
    # Fallbacks do not count: what a device plugin's catch-all fallback does with this op is unknown.
    return dispatch.has_kernel(definition.name, key) or (
        key in DEVICE_KEYS and dispatch.has_kernel(definition.name, _COMPOSITE_KEY)
    )


def _op_name(definition: OpDefinition) -> str:
    return definition.name.split("::")[1]


def _schema(definition: OpDefinition) -> str:
    return definition.name + definition.signature
