"""Replace the functions that read or write files in all loaded modules, and restore them later.

Python's functions are replaced under every module global that refers to them, such as `open` in `bz2`. The writer of
`torch.save`, torch's profile exporter and safetensors open files in native code, so they are replaced as well.
"""

from __future__ import annotations

import builtins
import functools
import os
import pathlib
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.profiler

from compile_fsdp.tools.overlay import Access
from compile_fsdp.torch_compat.files import file_writer

Handle = Callable[..., Any]
"""Is called with the name of a replaced function, the function, and the arguments of the call."""

Accesses = Mapping[str, Access | None]
"""By name of a function's first arguments: how the function uses the path; None if the argument is no path."""

_FUNCTIONS = {
    Access.READ: "stat access chdir statvfs getxattr listxattr",
    Access.LOOK: "lstat readlink",
    Access.LIST: "listdir scandir",
    Access.CHANGE: "chmod lchmod chown lchown utime setxattr removexattr truncate",
    Access.MAKE: "mkdir mkfifo mknod",
    Access.REMOVE: "remove unlink rmdir",
}
# By name of a function of `os`, which is also the name of Python's audit event, or of a further function.
ACCESSES: dict[str, Accesses] = {
    **{f"os.{name}": {"path": access} for access, names in _FUNCTIONS.items() for name in names.split()},
    "os.rename": {"src": Access.REMOVE, "dst": Access.REMOVE},
    "os.replace": {"src": Access.REMOVE, "dst": Access.REMOVE},
    "os.link": {"src": Access.CHANGE, "dst": Access.MAKE},
    "os.symlink": {"src": None, "dst": Access.MAKE},
    "os.open": {"path": Access.READ},
    "os.getcwd": {},
    "open": {"file": Access.READ},
    "sqlite3.connect": {"database": Access.CHANGE},
    "torch.writer": {"file": Access.REPLACE},
    "torch.from_file": {"filename": Access.READ},
    "torch.export_chrome_trace": {"self": None, "path": Access.REPLACE},
    "safetensors.write": {"tensor_dict": None, "filename": Access.REPLACE},
    "safetensors.read": {"filename": Access.READ},
}

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Python's import system reads and caches code with the functions of these modules.
_LEFT_ALONE = {"posix", "nt", "_io"}

_HAD_DESCRIPTORS = getattr(shutil, "_use_fd_functions", False)
_pairs: list[tuple[Callable[..., Any], Replacement]] = []


class Replacement:
    """Replacement for a function; a plain object, because a class would bind a function as a method."""

    def __init__(self, name: str, original: Callable[..., Any], handle: Handle) -> None:
        functools.update_wrapper(self, original)
        self._call = functools.partial(handle, name, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    # Equal to the original, which is in sets such as `os.supports_follow_symlinks`.
    def __eq__(self, other: object) -> bool:
        return other is self or other is vars(self)["__wrapped__"]

    def __hash__(self) -> int:
        return hash(vars(self)["__wrapped__"])


def find_accesses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Accesses:
    """Return how a call of a replaced function uses the paths among its arguments."""
    first, second = (*args[:2], None, None)[:2]
    if name == "open":
        if kwargs.get("opener", args[7] if len(args) > 7 else None) is not None:
            return {}  # an opener calls os.open, which is replaced
        mode = kwargs.get("mode", second or "r")
        by_mode = {"x": Access.MAKE, "w": Access.REPLACE, "a": Access.CHANGE, "+": Access.CHANGE}
        return {"file": next((access for letter, access in by_mode.items() if letter in mode), Access.READ)}
    if name == "os.open":
        flags = kwargs.get("flags", second)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            return {"path": Access.MAKE}
        writes = Access.REPLACE if flags & os.O_TRUNC else Access.CHANGE
        return {"path": writes if flags & _WRITE_FLAGS else Access.READ}
    if name == "torch.from_file" and kwargs.get("shared", second):
        return {"filename": Access.CHANGE}
    if name == "sqlite3.connect" and re.match("$|:memory:|file:", str(kwargs.get("database", first))):
        return {}
    if kwargs.get("follow_symlinks") is False:
        return {path: Access.LOOK if access is Access.READ else Access.MAKE for path, access in ACCESSES[name].items()}
    return ACCESSES[name]


def install(handle: Handle) -> None:
    """Replace the functions in all modules that are loaded."""
    _pairs.extend((original, Replacement(name, original, handle)) for name, original in _originals().items())
    _swap({id(original): new for original, new in _pairs})
    # With folder descriptors, shutil.rmtree would not pass the paths that it removes.
    vars(shutil)["_use_fd_functions"] = False
    profile: Any = torch.autograd.profiler.profile
    export = Replacement("torch.export_chrome_trace", profile.export_chrome_trace, handle)
    profile.export_chrome_trace = functools.partialmethod(export)
    storage: Any = torch.UntypedStorage
    storage.from_file = Replacement("torch.from_file", storage.from_file, handle)


def undo() -> None:
    """Restore the original functions."""
    _swap({id(new): original for original, new in _pairs})
    _pairs.clear()
    vars(shutil)["_use_fd_functions"] = _HAD_DESCRIPTORS
    profile: Any = torch.autograd.profiler.profile
    profile.export_chrome_trace = vars(profile)["export_chrome_trace"].func.__wrapped__
    del torch.UntypedStorage.from_file  # the base class has it


def _originals() -> dict[str, Callable[..., Any]]:
    """Return the functions to replace in all modules, by their names in `ACCESSES`."""
    found = {name: getattr(os, name[3:]) for name in ACCESSES if name.startswith("os.") and hasattr(os, name[3:])}
    found |= {"open": builtins.open, "sqlite3.connect": sqlite3.connect, "torch.writer": file_writer()}
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return found
    return found | {"safetensors.write": safetensors.serialize_file, "safetensors.read": safetensors.safe_open}


def _swap(new_by_id: dict[int, Any]) -> None:
    """Bind every module global whose value has an id in `new_by_id` to the new object."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get("__name__") not in _LEFT_ALONE:
            names.update({name: new_by_id[id(value)] for name, value in list(names.items()) if id(value) in new_by_id})
    accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of paths in a class
    for name, value in list(vars(accessor).items()) if accessor is not None else ():
        if id(value) in new_by_id:
            setattr(accessor, name, new_by_id[id(value)])
