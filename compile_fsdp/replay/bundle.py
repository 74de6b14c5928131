"""Bundles: files with a traced step and the facts it depends on.

[Note: Contents of a bundle]
A line of JSON has the facts; they are compared before the rest of the file is unpickled. Then comes a pickle: code,
conditions, compiled graphs. Unpickling runs code from the file, so a file is read only if it belongs to this user or
root, and not everybody may write it: see docs/performance.md.
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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.passes.cache_key import hash_package
from compile_fsdp.replay.words import class_name, describe, hash_code
from compile_fsdp.torch_compat.inductor import settings_hash

_MAGIC = b"compile_fsdp bundle 1\n"


class Outcomes(dict[Path, str]):
    """Outcomes of the bundles in one folder, by path.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder


_outcomes: Outcomes | None = None


@contextmanager
def kept_in(folder: Path) -> Iterator[Outcomes]:
    """Keep all models' bundles in one folder, under their file names.

    Inside the context, `locate` ignores the folders that models ask for.

    Args:
        folder: The folder; created with the first bundle.
    """
    global _outcomes
    outer, _outcomes = _outcomes, Outcomes(folder)
    try:
        yield _outcomes
    finally:
        _outcomes = outer


def locate(asked: str) -> Path:
    """Return the path of the bundle that a model asks for."""
    return Path(asked) if _outcomes is None else _outcomes.folder / Path(asked).name


def note(path: Path, outcome: str) -> None:
    """Keep the outcome of a bundle inside `kept_in`; do nothing outside."""
    if _outcomes is not None:
        _outcomes[path] = outcome


def make_facts(model: nn.Module, options: Options) -> dict[str, str]:
    """Return facts that a step depends on beside its conditions, by name."""
    facts: dict[str, str] = {
        "torch": torch.__version__,
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
        "code of compile_fsdp": hash_package(),
        "processor": _processor(),
        "options": repr(replace(options, bundle=None, progress=True, agreement_timeout_s=0.0)),
        "settings of Inductor": settings_hash(),
        "parameters": _hash([(name, *_words(parameter)) for name, parameter in model.named_parameters()]),
        "buffers": _hash([(name, describe(buffer)) for name, buffer in model.named_buffers()]),
        "modules": _hash([(name, class_name(type(module))) for name, module in model.named_modules()]),
        "code of the modules": _hash([_code_of(module) for module in model.modules()]),
    }
    return facts


def _processor() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # CUDA builds may run without a GPU
    if accelerator is None or accelerator.type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


def _words(parameter: nn.Parameter) -> tuple[object, object]:
    return describe(parameter), describe(getattr(parameter, "_spec", None))


def _code_of(module: nn.Module) -> object:
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else hash_code(code)


def _hash(described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()


def write(path: Path, facts: Mapping[str, Any], step: object) -> None:
    """Write a bundle, whole or not at all.

    Raises:
        NotPortableError: the step has an object that cannot be pickled.
        OSError: the file cannot be written.
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


def read(path: Path, facts: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the step in a bundle, and the hash of its pickle.

    Raises:
        NotPortableError: there is no bundle, it is damaged or not safe to read, or a fact differs; the text names the
            reason.
    """
    try:
        with path.open("rb") as file:
            _check_owner(os.fstat(file.fileno()))
            content = file.read()
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
        return pickle.loads(body), digest
    except Exception as error:  # pickled classes may raise any exception
        raise NotPortableError(f"it cannot be read: {type(error).__name__}: {error}") from error


def _check_owner(status: os.stat_result) -> None:
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
        raise NotPortableError("it belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise NotPortableError("everybody may write it")
