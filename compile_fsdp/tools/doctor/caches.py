"""Check of the compiler's cache."""

from __future__ import annotations

import shutil
import tempfile

from compile_fsdp.tools.doctor.rows import Row, State


def check_cache_folder(least_free_bytes: int = 2**30) -> Row:
    """Check that Inductor can write to its cache folder."""
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
    from compile_fsdp.passes.text import format_bytes

    free = shutil.disk_usage(folder).free
    text = f"{folder}, {format_bytes(free)} free"
    if free < least_free_bytes:  # a compiler without disk space stops a job in the middle
        return Row(State.WARNING, text, f"delete old files in it, or {remedy}")
    return Row(State.OK, text)
