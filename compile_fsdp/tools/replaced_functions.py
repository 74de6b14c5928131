"""Replace the functions that read or write files in all loaded modules, and restore them later.

Python's functions are replaced under every module global that refers to them, such as `open` in `bz2`. The writer of
`torch.save`, torch's profile exporter and all of safetensors open files in native code, so they are replaced as well.
"""

from __future__ import annotations

import builtins
import functools
import os
import pathlib
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.profiler

from compile_fsdp.torch_compat.files import file_writer

Handle = Callable[..., Any]
"""Is called with the original function, and then with the arguments of the call."""

# Python's import system reads and caches code with the functions of these modules.
_LEFT_ALONE = {"posix", "nt", "_io"}

_USE_DESCRIPTORS = "_use_fd_functions"
_uses_descriptors = getattr(shutil, _USE_DESCRIPTORS, False)


class Replacement:
    """Replacement for a function; a plain object, because a class would bind a function as a method.

    Args:
        original: The replaced function.
        find_handle: Returns the handle for the calling thread; None to call the original.
    """

    def __init__(self, original: Callable[..., Any], find_handle: Callable[[], Handle | None]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._find_handle = find_handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self._find_handle()
        return self.original(*args, **kwargs) if handle is None else handle(self.original, *args, **kwargs)


def originals() -> dict[str, Callable[..., Any]]:
    """Return the functions to replace in all modules, by the names of their handles."""
    names = (
        "open stat lstat access listdir scandir readlink chdir statvfs getxattr listxattr "  # these read
        "chmod lchmod chown lchown utime setxattr removexattr truncate mkdir mkfifo mknod symlink link "
        "remove unlink rmdir rename replace"
    )
    found = {f"os.{name}": getattr(os, name) for name in names.split() if hasattr(os, name)}
    found |= {"open": builtins.open, "sqlite3.connect": sqlite3.connect, "torch.writer": file_writer()}
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return found
    return found | {"safetensors.write": safetensors.serialize_file, "safetensors.read": safetensors.safe_open}


class Replaced:
    """Replacements of functions in all modules.

    Args:
        find_handle: Returns the handle of a name for the calling thread; None to call the original.
    """

    def __init__(self, find_handle: Callable[[str], Handle | None]) -> None:
        self._find_handle = find_handle
        self._pairs: list[tuple[Callable[..., Any], Replacement]] = []

    def install(self) -> None:
        """Replace the functions in all modules that are loaded."""
        self._pairs = [(each, self._make(name, each)) for name, each in originals().items()]
        _swap({id(original): new for original, new in self._pairs})
        for supports in _support_sets():
            supports.update(new for original, new in self._pairs if original in supports)
        # With folder descriptors, shutil.rmtree would not pass the paths that it removes.
        setattr(shutil, _USE_DESCRIPTORS, False)
        export = torch.autograd.profiler.profile.export_chrome_trace
        self._export = export
        make = self._make("torch.export_chrome_trace", export)
        torch.autograd.profiler.profile.export_chrome_trace = functools.partialmethod(make)  # type: ignore[assignment, method-assign]
        torch.UntypedStorage.from_file = self._make("torch.from_file", torch.UntypedStorage.from_file)  # type: ignore[method-assign]

    def undo(self) -> None:
        """Restore the original functions."""
        _swap({id(new): original for original, new in self._pairs})
        for supports in _support_sets():
            supports.difference_update(new for _, new in self._pairs)
        setattr(shutil, _USE_DESCRIPTORS, _uses_descriptors)
        torch.autograd.profiler.profile.export_chrome_trace = self._export  # type: ignore[method-assign]
        del torch.UntypedStorage.from_file  # the base class has it
        self._pairs = []

    def _make(self, name: str, original: Callable[..., Any]) -> Replacement:
        return Replacement(original, functools.partial(self._find_handle, name))


def _support_sets() -> tuple[set[Any], ...]:
    """Python's sets of functions that support `dir_fd`, descriptors, `follow_symlinks` or `effective_ids`."""
    return os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids


def _swap(new_by_id: dict[int, Any]) -> None:
    """Bind every module global whose value has an id in `new_by_id` to the new object."""
    for names in _namespaces():
        for name, value in list(names.items()):
            if (new := new_by_id.get(id(value))) is not None:
                names[name] = new
    accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of paths in a class
    for name, value in list(vars(accessor).items()) if accessor is not None else ():
        if (new := new_by_id.get(id(value))) is not None:
            setattr(accessor, name, new)


def _namespaces() -> Iterator[dict[str, Any]]:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get("__name__") not in _LEFT_ALONE:
            yield names
