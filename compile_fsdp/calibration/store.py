"""Store measured costs for later processes: a file for each device and mesh, beside Inductor's caches.

[Note: Validity of a measurement]
A measurement is valid for one device, thread count, release of torch, process-group backend and matrix dtype. It also
depends on the number of ranks in the process group, the distance between their rank numbers, and the number of the
job's ranks per host. If any of these differs, the costs are measured again. So a mesh within a host and a mesh across
hosts have separate files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compile_fsdp.calibration.measure import Link, Measurements
from compile_fsdp.torch_compat.distributed import backend_name
from compile_fsdp.torch_compat.inductor import cache_folder

Circumstances = Mapping[str, Any]


def circumstances(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Circumstances:
    """The key of a measurement. See [Note: Validity of a measurement]."""
    ranks = dist.get_process_group_ranks(group)
    return {
        "device": _device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "torch": torch.__version__,
        "backend": backend_name(group, device.type),
        "ranks": len(ranks),
        "apart": ranks[1] - ranks[0],
        "ranks_of_a_host": int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        "dtype": str(dtype),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    name: str = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device)
    return name


def folder() -> Path:
    """The folder of the measurement files; it may not exist yet."""
    return cache_folder() / "compile_fsdp" / "costs"


def path_of(key: Circumstances) -> Path:
    """The file for a measurement under these circumstances."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def kept() -> dict[Path, Circumstances | None]:
    """All measurement files and their circumstances; None for a file that cannot be parsed."""
    contents = {path: _content(path) for path in sorted(folder().glob("*.json"))}
    return {path: None if content is None else content[0] for path, content in contents.items()}


def read(key: Circumstances) -> Measurements | None:
    """Read a stored measurement; None if there is no file or it cannot be parsed."""
    content = _content(path_of(key))
    return content[1] if content is not None and content[0] == key else None


def _content(path: Path) -> tuple[Circumstances, Measurements] | None:
    try:
        content = json.loads(path.read_text())
        return content["under"], parse(content["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(key: Circumstances, measured: Measurements) -> None:
    """Store a measurement. If the folder is not writable, do nothing, and the next process measures again."""
    path, text = path_of(key), json.dumps({"under": key, "measured": asdict(measured)}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write to a temporary folder and rename, so that no process reads a partial file.
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            (Path(aside) / path.name).write_text(text)
            (Path(aside) / path.name).replace(path)


def parse(row: Mapping[str, Any]) -> Measurements:
    """Build `Measurements` from their `dataclasses.asdict` form."""
    links = {name: Link(**row[name]) for name in ("gather", "reduction")}
    return Measurements(**{**row, **links})
