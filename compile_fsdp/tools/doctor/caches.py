"""Checks of the data kept between processes: the compiler's cache and measured costs."""

from __future__ import annotations

import os
import shutil
import tempfile

from compile_fsdp.tools.doctor.rows import Row, State

# A warning below this, because a compiler without disk space stops a job in the middle.
LEAST_FREE_BYTES = 2**30


def check_cache_folder(least_free_bytes: int = LEAST_FREE_BYTES) -> Row:
    """Check that Inductor can write to its cache folder.

    Args:
        least_free_bytes: Free bytes below which the row is a warning.
    """
    remedy = "name a folder that you may write to in the variable TORCHINDUCTOR_CACHE_DIR"
    try:
        # torch makes the folder when its compilers are imported.
        from compile_fsdp.torch_compat.inductor import cache_folder

        folder = cache_folder()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except ImportError:
        return Row(State.UNCHECKED, "see private names")
    except OSError as error:
        return Row(State.FAULT, str(error), remedy)
    from compile_fsdp.tools.explain.units import format_bytes

    free = shutil.disk_usage(folder).free
    text = f"{folder}, {format_bytes(free)} free"
    if free < least_free_bytes:
        return Row(State.WARNING, text, f"delete old files in it, or {remedy}")
    return Row(State.OK, text)


def check_costs() -> Row:
    """Check for stored costs of this torch; with them, the first compile of a job measures nothing."""
    import torch

    from compile_fsdp.calibration import store
    from compile_fsdp.options import COSTS_VARIABLE

    kept = store.kept()
    broken = [path.name for path, under in kept.items() if under is None]
    if broken:
        return Row(State.WARNING, f"not readable in {store.folder()}: {', '.join(broken)}", "delete these files")
    if os.environ.get(COSTS_VARIABLE) == "constants":
        return Row(State.OK, f"not used: {COSTS_VARIABLE}=constants")
    ours = [under for under in kept.values() if under is not None and under.get("torch") == torch.__version__]
    if not ours:
        return Row(State.OK, "none kept for this torch: the first compile measures them, or compile-fsdp calibrate")
    return Row(State.OK, f"{len(ours)} kept for this torch, in {store.folder()}")
