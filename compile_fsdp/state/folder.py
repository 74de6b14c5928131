"""The folder of a run's checkpoints: begin and complete a save, and find the newest checkpoint.

    latest               the name of the newest complete checkpoint
    step-00000200/       a complete checkpoint: torch.distributed.checkpoint's files and the caller's files
    step-00000300.part/  a running or interrupted save; the next save removes it

[Note: A save becomes complete in two renames]
A save writes all files into `step-N.part`; the last file of torch.distributed.checkpoint is `.metadata`. The first
rename turns the folder into `step-N`, and the second makes `latest` name it; each rename is atomic. If a save is
interrupted before the second rename, `latest` still names the previous checkpoint, which no save modifies. If `latest`
names `step-N` when step N is saved again, the new checkpoint is called `step-N-again`, and the reverse.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from compile_fsdp.errors import CheckpointError

MARKER = "latest"
METADATA = ".metadata"


def find_latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is no checkpoint yet. Changes no file.

    Raises:
        CheckpointError: the path is a file, or `latest` names a folder without a complete checkpoint.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"expected a folder of checkpoints, got the file {folder}; give another path")
    marker = folder / MARKER
    if not marker.exists():
        return None
    latest = folder / marker.read_text().strip()
    if not (latest / METADATA).is_file():
        raise CheckpointError(
            f"{marker} names {latest.name}, which is no complete checkpoint; write the name of another step folder "
            "into it, or give another path"
        )
    return latest


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The newest checkpoint in a folder of checkpoints, or the path itself if it is a checkpoint."""
    folder = Path(path)
    if (folder / METADATA).is_file():
        return folder
    if (latest := find_latest(folder)) is None:
        raise CheckpointError(f"expected a checkpoint at {folder}, found none; save() one first, or give another path")
    return latest


def begin(folder: Path, step: int) -> Path:
    """Remove interrupted saves, and return the path of a new save's `.part` folder, which does not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"expected a folder for checkpoints, got the file {folder}; give another path")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step-*.part"):
        shutil.rmtree(leftover)
    marker = folder / MARKER
    current = marker.read_text().strip() if marker.exists() else ""
    name = f"step-{step:08d}"
    name = f"{name}-again" if current == name else name
    if (folder / name).exists():  # from a save that was interrupted between its two renames
        shutil.rmtree(folder / name)
    return folder / f"{name}.part"


def complete(part: Path, files: Mapping[str, str]) -> Path:
    """Add files to a save, and make it the newest checkpoint. See [Note: A save becomes complete in two renames]."""
    for name, text in files.items():
        _write(part / name, text)
    target = part.with_suffix("")
    _sync_folder(part)
    os.rename(part, target)
    _sync_folder(part.parent)
    marker = part.parent / MARKER
    _write(marker.with_suffix(".part"), target.name + "\n")
    os.replace(marker.with_suffix(".part"), marker)
    _sync_folder(part.parent)
    other = target.name.removesuffix("-again") if target.name.endswith("-again") else f"{target.name}-again"
    shutil.rmtree(part.parent / other, ignore_errors=True)  # an earlier checkpoint of this step
    return target


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk so that its new files and renames survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
