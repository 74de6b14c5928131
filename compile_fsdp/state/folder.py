"""The folder of a run's checkpoints: how a save becomes complete, and which one is the newest.

    latest               the name of the newest complete checkpoint
    step-00000200/       one complete checkpoint: torch.distributed.checkpoint's files, and the caller's own
    step-00000300.part/  a save that is going on, or was interrupted; the next save removes it

[Note: A save becomes complete in two renames]
Everything is written into `step-N.part`, whose last file is torch.distributed.checkpoint's `.metadata`. The first
rename makes it `step-N`, the second makes `latest` name it; each is atomic. If a save is interrupted before the second
rename, `latest` still names the previous checkpoint, which no save touches. If `latest` names the step to be saved, the
new checkpoint is called `step-N-again`, or `step-N` if `latest` names `step-N-again`: the two names take turns.
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
    """The newest complete checkpoint in a folder, or None if there is none yet; changes no file.

    Raises:
        CheckpointError: the path is a file, or `latest` names something that is no complete checkpoint.
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
    """The checkpoint at a path: the newest one in a folder of checkpoints, or the path itself.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = Path(path)
    if not folder.is_file() and (folder / METADATA).is_file():
        return folder
    latest = find_latest(folder)
    if latest is None:
        raise CheckpointError(f"expected a checkpoint at {folder}, found none; save() one first, or give another path")
    return latest


def begin(folder: Path, step: int) -> Path:
    """Remove interrupted saves, and return the `.part` folder for a new one, which does not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"expected a folder for checkpoints, got the file {folder}; give another path")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step-*.part"):
        shutil.rmtree(leftover)
    marker = folder / MARKER
    current = marker.read_text().strip() if marker.exists() else ""
    name = f"step-{step:08d}"
    name = f"{name}-again" if current == name else name
    if (folder / name).exists():  # complete, but the save was interrupted before `latest` moved to it
        shutil.rmtree(folder / name)
    return folder / f"{name}.part"


def complete(part: Path, files: Mapping[str, str]) -> Path:
    """Make a save the newest checkpoint. See [Note: A save becomes complete in two renames].

    Args:
        part: The `.part` folder, with torch.distributed.checkpoint's files in it.
        files: Texts to add, by file name.
    """
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
    """Flush a folder to disk, so that renames and new files in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
