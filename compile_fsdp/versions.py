"""Which torch this is for: said at import, by name, before anything else fails for it."""

from __future__ import annotations

import importlib

import torch

OLDEST, NEWEST = (2, 11), (2, 15)

# Private names that `compat.py` imports where they are needed; the others it imports with itself.
USED_LATER = (
    "torch._dynamo.utils.counters",
    "torch._dynamo.utils.get_compilation_metrics",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._inductor.ir",
    "torch._inductor.list_mode_options",
    "torch._inductor.list_options",
    "torch._inductor.lowering.add_layout_constraint",
    "torch._inductor.lowering.constrain_to_fx_strides",
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.register_lowering",
    "torch._inductor.output_code.OutputCode",
    "torch._logging._internal.trace_structured",
    "torch.distributed._composable_state._get_module_state",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils.flop_counter.flop_registry",
)


def check_version(version: str) -> None:
    """Refuse a torch that is too old or too new.

    Raises:
        ImportError: it is neither of these releases nor between them.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        (oldest, newest), (major, minor) = (f"{a}.{b}" for a, b in (OLDEST, NEWEST)), NEWEST
        raise ImportError(
            f"compile_fsdp works with torch {oldest} to {newest}, found torch {version}; install one of these, with "
            f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
        )


def moved(error: Exception) -> ImportError:
    """What to raise where `compat.py` cannot be imported."""
    return ImportError(
        f"compile_fsdp uses a private name of torch that torch {torch.__version__} does not have: {error}; install "
        "torch 2.13.0, which it was checked with, and report it"
    )


def check_names() -> None:
    """Look all names up that are used later. It imports the compiler, so this is done before the first graph.

    Raises:
        ImportError: one has moved.
    """
    for name in USED_LATER:
        module, _, attribute = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise moved(error) from error


check_version(torch.__version__)
try:
    importlib.import_module("compile_fsdp.compat")
except (ImportError, AttributeError) as error:
    raise moved(error) from error
