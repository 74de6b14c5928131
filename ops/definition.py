"""Check torch's definition of an op, and add missing parts.

[Note: torch's definitions come first]
torch 2.11 to 2.15 define both ops, eager FSDP2 runs on these definitions, and a device plugin may register its own
kernels. So this module replaces nothing: it adds a missing kernel, and names and refuses a definition that differs. It
does not repair the definition, because unrelated code in the process may rely on it.
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

# Every device type that eager FSDP2 runs on. Out-of-tree devices use PrivateUse1.
DEVICE_KEYS = ("Meta", "CPU", "CUDA", "XPU", "HPU", "MTIA", "PrivateUse1")

_COMPOSITE_KEY = "CompositeExplicitAutograd"  # One kernel for every device key.

_REMEDY = "install torch>=2.11,<2.16 and import nothing that defines or changes this op before compile_fsdp"


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """Schema, kernels and lowering that this project needs of an op.

    Attributes:
        name: `namespace::op`; the overload is always the default overload.
        signature: Arguments and returns as torch prints them, alias annotations included.
        kernels: By dispatch key, the kernel to add if the key has none. None: only torch can define the kernel.
        lowering: Inductor lowering to add if the op has none. None: only torch can define it.
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
    """Return the op without checking its schema.

    Raises:
        OpDefinitionError: torch does not define the op.
    """
    op = find_op(definition.name)
    if op is None:
        raise OpDefinitionError(f"expected the op {_schema(definition)}, found none; {_REMEDY}")
    return op


def get_or_define_op(definition: OpDefinition, library: torch.library.Library) -> OpOverload:
    """Return the op, whatever its schema; define it in `library` if missing."""
    if find_op(definition.name) is None:
        library.define(_op_name(definition) + definition.signature)
    return get_op(definition)


def pass_through(name: str) -> Kernel:
    """Return a Functionalize kernel that traces the op `name` as a write."""

    def kernel(*args: object) -> None:
        op = find_op(name)
        assert op is not None, f"{name} runs, so it is defined"
        with dispatch.below_functionalization():
            op(*(dispatch.unwrap_functional(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))

    return kernel


def ensure_definition(
    definition: OpDefinition, library: torch.library.Library | None = None
) -> tuple[str, ...]:
    """Check the op's schema, add missing kernels, and mark its side effect.

    Args:
        definition: The definition that this project needs.
        library: Owner of the added kernels, which vanish when it is collected. None if the definition has no kernels to
            add.
    Returns:
        The dispatch keys that this call added; a second call adds none.
    Raises:
        OpDefinitionError: The schema differs, or a kernel is missing that only torch can define.
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
    # Neither op returns anything, and the resize declares no write: without the mark, it would be dead code.
    torch.fx.has_side_effect(op)
    return tuple(missing)


def ensure_lowering(definition: OpDefinition) -> bool:
    """Add an Inductor lowering if the op has none. Imports Inductor.

    Returns:
        Whether this call added the lowering.
    Raises:
        OpDefinitionError: The lowering is missing and only torch can define it.
    """
    op = get_op(definition)
    if op in inductor.inductor_lowerings():
        return False
    if definition.lowering is None:
        raise OpDefinitionError(f"expected an Inductor lowering of {definition.name}, found none; {_REMEDY}")
    inductor.register_inductor_lowering(op, definition.lowering)
    return True


def _has_kernel(definition: OpDefinition, key: str) -> bool:
    # Fallbacks do not count, because the effect of a device plugin's catch-all fallback on this op is unknown.
    return dispatch.has_kernel(definition.name, key) or (
        key in DEVICE_KEYS and dispatch.has_kernel(definition.name, _COMPOSITE_KEY)
    )


def _op_name(definition: OpDefinition) -> str:
    return definition.name.split("::")[1]


def _schema(definition: OpDefinition) -> str:
    return definition.name + definition.signature
