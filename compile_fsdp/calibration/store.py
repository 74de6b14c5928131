"""Where measurements are kept from one process to the next: a file for each device and mesh, beside Inductor's caches.

[Note: What a measurement holds for]
The device and its threads, the release of torch, what carries the collectives, how many ranks there are in the process
group and how far apart their numbers are, how many of the job share a host, and the dtype of the matrices. Where one of
these differs, it is measured again. So a mesh within a host and one across hosts have a file each.
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
    """See [Note: What a measurement holds for]."""
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
    """Where the files are; it need not exist."""
    return cache_folder() / "compile_fsdp" / "costs"


def path_of(key: Circumstances) -> Path:
    """The file with what was measured under these circumstances."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def kept() -> dict[Path, Circumstances | None]:
    """All files, with the circumstances that each holds for; None for one that is no such file."""
    contents = {path: _content(path) for path in sorted(folder().glob("*.json"))}
    return {path: None if content is None else content[0] for path, content in contents.items()}


def read(key: Circumstances) -> Measurements | None:
    """What was measured before; None if nothing was, or the file is no such file."""
    content = _content(path_of(key))
    return content[1] if content is not None and content[0] == key else None


def _content(path: Path) -> tuple[Circumstances, Measurements] | None:
    try:
        content = json.loads(path.read_text())
        return content["under"], parse(content["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(key: Circumstances, measured: Measurements) -> None:
    """Keep a measurement. A folder that cannot be written to is no error: the next process measures again."""
    path, text = path_of(key), json.dumps({"under": key, "measured": asdict(measured)}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside, so that another process reads the whole of it or nothing.
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            (Path(aside) / path.name).write_text(text)
            (Path(aside) / path.name).replace(path)


def parse(row: Mapping[str, Any]) -> Measurements:
    """The inverse of `dataclasses.asdict`."""
    links = {name: Link(**row[name]) for name in ("gather", "reduction")}
    return Measurements(**{**row, **links})
