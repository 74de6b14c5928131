"""Bundles: files with the traced steps of a model and the facts they depend on.

[Note: Contents of a bundle]
A line of JSON has the facts, which are compared before the pickle behind it is read: code, conditions, compiled graphs.
Unpickling runs code from the file, so a file is read only if it belongs to this user or root, and not everybody may
write it: see docs/performance.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.passes.cache_key import hash_package
from compile_fsdp.replay.words import base_names, describe, hash_code, hash_words
from compile_fsdp.torch_compat.global_state import attention_backends
from compile_fsdp.torch_compat.inductor import cache_folder, settings_hash

_MAGIC = b"compile_fsdp bundle 1\n"

# Bounds of the folder of bundles that no option names.
_MOST_FILES = 256  # a model has one for each GPU of the machine
_MOST_BYTES = 4 * 2**30

# Inside `kept_in`: the folder of all bundles, None for no bundles, and their outcomes by path.
_kept: tuple[Path | None, dict[Path, str]] | None = None


@contextmanager
def kept_in(folder: Path | None) -> Iterator[dict[Path, str]]:
    """Keep all bundles in one folder, not where models keep them; None: keep none. Yield their outcomes by path."""
    global _kept
    outcomes: dict[Path, str] = {}
    outer, _kept = _kept, (folder, outcomes)
    try:
        yield outcomes
    finally:
        _kept = outer


def kept_folder() -> Path | None:
    """Return the folder that all bundles are kept in; None outside of `kept_in`, and if none are kept."""
    return None if _kept is None else _kept[0]


def are_kept() -> bool:
    return _kept is None or _kept[0] is not None


def own_folder() -> Path:
    """Return the folder of bundles that no option names."""
    return cache_folder() / "compile_fsdp"


def locate(asked: str | None, facts: Mapping[str, str]) -> Path:
    """Return the path of a model's bundle; `asked` is the path in its options, or None."""
    path = own_folder() / f"{hash_words(sorted(facts.items()))[:32]}.bundle" if asked is None else Path(asked)
    return path if (folder := kept_folder()) is None else folder / path.name


def remove_oldest() -> None:
    """Remove from `own_folder` the bundles that were not used for longest, down to its bounds."""
    size_bytes = 0
    with suppress(OSError):  # other processes use the folder, too
        found = [(path, path.stat()) for path in own_folder().glob("*.bundle")]
        for i, (path, status) in enumerate(sorted(found, key=lambda each: each[1].st_mtime, reverse=True)):
            size_bytes += status.st_size
            if i >= _MOST_FILES or size_bytes > _MOST_BYTES:
                path.unlink(missing_ok=True)


def note(path: Path, outcome: str) -> None:
    """Keep the outcome of a bundle inside `kept_in`; do nothing outside."""
    if _kept is not None:
        _kept[1][path] = outcome


def make_facts(model: nn.Module, options: Options, device: torch.device) -> dict[str, str]:
    """Return facts that a step depends on beside its conditions, by name; `device` is that of the computation."""
    parameters = [
        (name, describe(each), describe(getattr(each, "_spec", None))) for name, each in model.named_parameters()
    ]
    codes = [getattr(type(module).forward, "__code__", None) for module in model.modules()]
    return {
        "torch": torch.__version__,
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
        "code of compile_fsdp": hash_package(),
        "processor": _processor(),
        "device": str(device),  # compiled code names its GPU
        "world size": str(dist.get_world_size()),  # Dynamo makes it a constant without a guard
        "options": _describe_options(options),
        "settings of Inductor": settings_hash(),
        "backends of attention": str(attention_backends(by_priority=True)),
        "parameters": hash_words(parameters),
        "buffers": hash_words([(name, describe(buffer)) for name, buffer in model.named_buffers()]),
        "modules": hash_words([(name, base_names(type(module))) for name, module in model.named_modules()]),
        "code of the modules": hash_words([code and hash_code(code) for code in codes]),
    }


def _describe_options(options: Options) -> str:
    # Sorted, because each process has its own order of a set of strings.
    names = sorted(options.disabled_passes)
    rest = replace(options, disabled_passes=frozenset(), bundle=None, progress=True, agreement_timeout_s=0.0)
    return f"{rest!r}, disabled passes: {names}"


def _processor() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # CUDA builds may run without a GPU
    if accelerator is None or accelerator.type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


def write(path: Path, facts: Mapping[str, Any], step: object) -> None:
    """Write a bundle, whole or not at all.

    NotPortableError if the step cannot be pickled, OSError if the file cannot be written.
    """
    try:
        body = pickle.dumps(step)
    except Exception as error:  # pickled classes may raise any exception
        raise NotPortableError(f"{type(error).__name__}: {error}") from error
    head = json.dumps({"facts": facts, "sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + head.encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path, facts: Mapping[str, Any]) -> Any:
    """Return what a bundle contains.

    NotPortableError if there is no bundle, it is damaged or not safe to read, or a fact differs.
    """
    try:
        with path.open("rb") as file:
            _check_owner(os.fstat(file.fileno()))
            content = file.read()
        with suppress(OSError):  # it may belong to root
            os.utime(path)  # used now: see `remove_oldest`
    except FileNotFoundError:
        raise NotPortableError("there is none yet") from None
    except OSError as error:
        raise NotPortableError(f"it cannot be read: {error}") from error
    magic, _, rest = content.partition(b"\n")
    if magic + b"\n" != _MAGIC:
        raise NotPortableError("the file is no bundle, or a bundle of a different version")
    line, _, body = rest.partition(b"\n")
    try:
        head = json.loads(line)
        made, digest = head["facts"], head["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotPortableError(f"its first lines are damaged: {error}") from error
    for name in sorted({*made, *facts}):
        if made.get(name) != facts.get(name):
            raise NotPortableError(f"it was made with different {name}: {made.get(name)}, not {facts.get(name)}")
    if hashlib.sha256(body).hexdigest() != digest:
        raise NotPortableError(f"it is damaged: {len(body)} of {head.get('bytes')} bytes, or changed bytes")
    try:
        return pickle.loads(body)
    except Exception as error:  # pickled classes may raise any exception
        raise NotPortableError(f"it cannot be read: {type(error).__name__}: {error}") from error


def _check_owner(status: os.stat_result) -> None:
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
        raise NotPortableError("it belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise NotPortableError("everybody may write it")
