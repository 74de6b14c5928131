"""Keep a script's writes away from the user's files while a command runs the script.

Writes go to an overlay in a temporary folder, and the script reads them back from there. Temporary files, compiler
caches and devices are written as usual. A write by a function that is not redirected (`io.FileIO`) is refused if Python
reports it to audit hooks. Programs that the script starts are not covered, nor files that a library, except torch and
safetensors, opens in C or C++.

[Note: Until the process ends]
A command ends a script before the script's own end. The script's threads go on, for example an asynchronous save, and
its atexit functions run after the command has finished. Both stay redirected. atexit functions run in reverse order:
the one registered after the script's starts the redirection again, the one registered before them removes the overlay.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from compile_fsdp.passes.text import fill, list_names
from compile_fsdp.tools import replaced_functions
from compile_fsdp.tools.overlay import Access, Entries, Overlay, is_below
from compile_fsdp.tools.replaced_functions import ACCESSES, find_accesses
from compile_fsdp.torch_compat.inductor import cache_folder

# Variables that name cache folders, which are not protected.
_CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"),
    *("TORCH_HOME", "TORCH_TRACE", "HF_HOME", "XDG_CACHE_HOME"),
)
_FREE = ("/dev", "/proc", "/sys", "~/.cache", "~/.triton", "~/.nv", "~/Library/Caches")


class ProtectedFiles:
    """Protection of the user's files while a command runs a script, whose folder may be a temporary one."""

    def __init__(self, command: str, script: Path) -> None:
        self.command = command
        self.overlay = Overlay(_overlay_folder())
        self.is_running = False
        self.threads: WeakSet[threading.Thread] = WeakSet()  # threads that the script leaves running
        self.cwd = os.getcwd()
        self._own = [self.cwd, os.path.abspath(script.parent)]
        self._rules = cache(self._make_rules)
        cache_folder()  # makes the folder and sets TORCHINDUCTOR_CACHE_DIR

    def keep(self, paths: Iterable[Path]) -> None:
        """Copy files that the command itself wrote during the script from the overlay to their real paths."""
        with _unprotected():
            for path in paths:
                self.overlay.keep(str(path))

    def protects(self, path: str) -> bool:
        """Whether a path without symbolic links is a user's file; the nearest folder with a rule decides."""
        rules = self._rules(tuple(os.environ.get(name, "") for name in _CACHES))  # the script may set them
        while path not in rules:
            path = os.path.dirname(path)
        return rules[path]

    def _make_rules(self, caches: tuple[str, ...]) -> dict[str, bool]:
        """By folder, whether the files in it are protected."""
        debug = os.path.join(self.cwd, "torch_compile_debug")
        free = (*map(os.path.expanduser, _FREE), *filter(None, caches), debug, self.overlay.folder)
        rules = {os.sep: True, tempfile.gettempdir(): False}
        rules |= dict.fromkeys(self._own, True) | dict.fromkeys(free, False)
        return {os.path.realpath(folder): protects for folder, protects in rules.items()}

    def find(self, path: Any, access: Access) -> Any:
        """Return the path for a call to use instead of a path; `path` itself if nothing changes."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not (access.writes or self.overlay.is_changed):
            return path
        text = os.fsdecode(path)
        key = self.overlay.key(text)
        real = access.resolve(key)
        if not self.protects(real):
            return path
        found = self.overlay.find(key if self.protects(key) else real, access)
        if found == real and not is_below(os.path.abspath(text), self.overlay.tree):
            return path
        return os.fsencode(found) if isinstance(os.fspath(path), bytes) else found

    def call(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a replaced function for the script, with paths of the overlay."""
        if name in ("os.listdir", "os.scandir") and not args:
            args = (kwargs.pop("path", None) or ".",)
        own: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        has_folder = any(own.get(each) is not None for each in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
        try:
            with _unprotected():
                for i, (argument, access) in enumerate(find_accesses(name, args, kwargs).items()):
                    at = i if i in own else argument
                    if access is None or at not in own:
                        continue
                    if not has_folder or os.path.isabs(own[at]):
                        own[at] = self.find(own[at], access)
                    elif access.writes:
                        raise self._refusal(own[at])
                if name == "os.scandir" and own[0] is not args[0]:
                    return Entries(args[0], os.listdir(own[0]))
            result = original(*(own[i] for i in range(len(args))), **{each: own[each] for each in kwargs})
            return self.overlay.key(result) if name == "os.getcwd" else result
        except OSError as error:
            for attribute in ("filename", "filename2"):
                if is_below(path := str(getattr(error, attribute)), self.overlay.tree):
                    setattr(error, attribute, self.overlay.key(path))
            raise

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise a PermissionError if an audit event changes a protected file."""
        name, args = ("os.open", (arguments[0], arguments[2])) if event == "open" else (event, arguments)
        with _unprotected():
            for path, access in zip(args, find_accesses(name, args, {}).values(), strict=False):
                if access is None or not access.writes or not isinstance(path, (str, bytes, os.PathLike)):
                    continue
                if self.protects(access.resolve(os.path.abspath(os.fsdecode(path)))):
                    raise self._refusal(path)

    def _refusal(self, path: Any) -> PermissionError:
        why = f"not written: compile-fsdp {self.command} runs the script without its writes"
        return PermissionError(errno.EACCES, why, path)

    def report(self) -> None:
        """Print the files that the script's writes have not changed."""
        for word, paths in zip(("written", "removed"), self.overlay.changes(), strict=True):
            names = tuple(os.path.relpath(path) if is_below(path, os.getcwd()) else path for path in paths)
            if names:
                why = f"({self.command} runs the script without its writes)"
                print(fill(f"not {word}: {list_names(names)} {why}"), flush=True)


@contextmanager
def protected_files(command: str, script: Path) -> Iterator[ProtectedFiles]:
    """Keep a script's writes away from the user's files inside the block, then print the files that were not written.

    `command` is the name of the command, for messages. See [Note: Until the process ends].
    """
    files = ProtectedFiles(command, script)
    atexit.register(_remove, files, os.getpid())
    before = set(threading.enumerate())
    _start(files)
    try:
        yield files
    finally:
        files.is_running = False
        files.threads.update(set(threading.enumerate()) - before)
        if not files.threads:
            _stop()
        os.chdir(files.cwd)  # the script may have changed into a folder of the overlay
        atexit.register(_start, files)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            files.report()


_present: ProtectedFiles | None = None  # until the script and its threads have ended
_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []
_inside = threading.local()


@contextmanager
def _unprotected() -> Iterator[None]:
    """Turn the redirection off for this thread inside the block."""
    outer, _inside.value = getattr(_inside, "value", False), True
    try:
        yield
    finally:
        _inside.value = outer


def _protection() -> ProtectedFiles | None:
    """The protection of the calling thread; None if the thread does not run code of the script."""
    if _present is None or getattr(_inside, "value", False):
        return None
    return _present if _present.is_running or threading.current_thread() in _present.threads else None


def _call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    files = _protection()
    return original(*args, **kwargs) if files is None else files.call(name, original, args, kwargs)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ACCESSES and (files := _protection()) is not None:
        files.refuse(event, arguments)


def _start(files: ProtectedFiles) -> None:
    global _present
    if not _hooks:
        sys.addaudithook(_audit)  # Python cannot remove an audit hook
        _hooks.append(_audit)
    if _present is None:
        replaced_functions.install(_call)
    _present, files.is_running = files, True


def _stop() -> None:
    global _present
    if _present is not None:
        replaced_functions.undo()
    _present = None


def _remove(files: ProtectedFiles, process: int) -> None:
    """Unregister this process, and remove the folder if no rank uses it any more."""
    if os.getpid() != process:
        return  # a forked child inherits this atexit function
    _stop()
    users = Path(files.overlay.folder, "users")
    (users / str(process)).unlink(missing_ok=True)
    if not users.exists() or not any(users.iterdir()):
        shutil.rmtree(files.overlay.folder, ignore_errors=True)


def _overlay_folder() -> str:
    """Make a temporary folder and register this process in it; ranks of one host share it under torchrun."""
    if not dist.is_torchelastic_launched():
        folder = tempfile.mkdtemp(prefix="compile_fsdp_")
    else:
        start = [os.getppid(), os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RESTART_COUNT")]
        folder = os.path.join(tempfile.gettempdir(), "_".join(["compile_fsdp", *map(str, [os.getuid(), *start])]))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.stat(folder).st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "the folder belongs to another user", folder)
    os.makedirs(os.path.join(folder, "users"), exist_ok=True)
    Path(folder, "users", str(os.getpid())).touch()
    return folder
