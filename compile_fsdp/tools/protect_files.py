"""Keep a script's writes away from the user's files while a command runs the script.

Writes go to an overlay in a temporary folder, and the script reads them back from there. Temporary files, compiler
caches and devices are written as usual. A write by a function that is not redirected (`io.FileIO`) is refused if Python
reports it to audit hooks. The protection does not cover programs that the script starts, and files that a library,
except torch and safetensors, opens in C or C++.

[Note: Until the process ends]
A command ends a script before the script's own end. The script's threads go on, for example an asynchronous save, and
its atexit functions run after the command has finished. Both stay redirected. atexit functions run in reverse order of
registration: the function registered after the script's functions starts the redirection again, and the function
registered before them removes the overlay.
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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from compile_fsdp.tools.check.findings import list_names
from compile_fsdp.tools.overlay import Overlay, is_below
from compile_fsdp.tools.overlay_calls import HANDLES, Place
from compile_fsdp.tools.replaced_functions import Handle, Replaced
from compile_fsdp.torch_compat.inductor import cache_folder

# Variables that name cache folders, which are not protected.
_CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"),
    *("TORCH_HOME", "TORCH_TRACE", "HF_HOME", "XDG_CACHE_HOME"),
)
_HOME_CACHES = ("~/.cache", "~/.triton", "~/.nv", "~/Library/Caches")
_SYSTEM = ("/dev", "/proc", "/sys")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Audit events that change a file: number of leading arguments that are paths.
_EVENTS = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1,
    "os.setxattr": 1, "os.removexattr": 1, "os.rename": 2,
}  # fmt: skip


class ProtectedFiles:
    """Protection of the user's files during one run of a script.

    Args:
        command: Name of the command, for messages.
        script: Path of the script. Files in its folder are protected even if it is a temporary folder.
    """

    def __init__(self, command: str, script: Path) -> None:
        self.command = command
        self.overlay = Overlay(_overlay_folder())
        self._cwd = os.getcwd()
        self._own = [os.path.realpath(self._cwd), os.path.realpath(script.parent)]
        self._free: tuple[list[str | None], dict[str, bool]] = ([], {})
        self._kept: set[str] = set()
        self._is_running = False
        self._threads: WeakSet[threading.Thread] = WeakSet()  # threads that the script leaves running
        cache_folder()  # makes the folder and sets TORCHINDUCTOR_CACHE_DIR

    @contextmanager
    def running(self) -> Iterator[ProtectedFiles]:
        """Redirect the writes of the block, then print the files that were not written.

        See [Note: Until the process ends].
        """
        atexit.register(self._remove, os.getpid())
        before = set(threading.enumerate())
        self._start()
        try:
            yield self
        finally:
            self._threads.update(set(threading.enumerate()) - before)
            self._stop()
            os.chdir(self._cwd)  # the script may have changed into a folder of the overlay
            atexit.register(self._start)
            self._report()

    def keep(self, paths: Iterable[Path]) -> None:
        """Copy files that the command itself wrote during the script from the overlay to their real paths."""
        with _unprotected():
            for path in paths:
                key = self.overlay.key(str(path))
                self._kept.add(key)
                if (place := self.overlay.find(key)) != key and os.path.isfile(place):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(place, new := f"{path}.{os.getpid()}")
                    os.replace(new, path)

    def applies(self) -> bool:
        """Whether the calling thread runs code of the script."""
        return self._is_running or threading.current_thread() in self._threads

    def protects(self, key: str) -> bool:
        """Whether a path without symbolic links is a user's file; the nearest folder of `_folders` decides."""
        variables = [os.environ.get(name) for name in _CACHES]
        if variables != self._free[0]:
            self._free = (variables, self._folders([each for each in variables if each]))
        folders, path = self._free[1], key
        while path not in folders:
            path = os.path.dirname(path)
        return folders[path]

    def _folders(self, caches: list[str]) -> dict[str, bool]:
        """By folder, whether the files in it are protected."""
        temporary = {tempfile.gettempdir(): False}
        own = {folder: True for folder in self._own}
        debug = os.path.join(self._cwd, "torch_compile_debug")
        free = (*_SYSTEM, *_HOME_CACHES, *caches, debug, self.overlay.folder)
        folders = {os.sep: True} | temporary | own | {os.path.expanduser(folder): False for folder in free}
        return {os.path.realpath(folder): protects for folder, protects in folders.items()}

    def place(self, path: Any, writes: bool = False, follow: bool = True, dir_fd: int | None = None) -> Place | None:
        """Return a protected path as a `Place`; None for an open file or an unprotected path.

        Args:
            path: The argument that the script passes.
            writes: Whether the call changes the path. A call that only reads needs no place until the script changes
                a file.
            follow: Whether to resolve the last component if it is a symbolic link.
            dir_fd: Descriptor of the folder that a relative path starts from; None for the current folder.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or not (writes or self.overlay.table):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        key = self.overlay.key(text, follow)
        return Place(self.overlay, key, isinstance(os.fspath(path), bytes)) if self.protects(key) else None

    def handle(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a replaced function for the script, with paths of the overlay."""
        with _unprotected():
            call = HANDLES[name](self, original, *args, **kwargs)
        try:
            return call()
        except OSError as error:
            if isinstance(error.filename, str) and self.overlay.holds(error.filename):
                error.filename = args[0]  # the path that the script knows
            raise

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse an audit event that changes a protected file.

        Raises:
            PermissionError: if the event changes a protected file.
        """
        if event == "open":
            paths = arguments[:1] if (arguments[2] or 0) & _WRITE_FLAGS else ()
        else:
            paths = arguments[: _EVENTS[event]]
        with _unprotected():
            for path in paths:
                if self.place(path, writes=True) is not None:
                    why = f"compile-fsdp {self.command} runs the script without its writes"
                    raise PermissionError(errno.EACCES, f"not written: {why}", path)

    def _start(self) -> None:
        self._is_running = True
        _add(self)

    def _stop(self) -> None:
        self._is_running = False
        _drop_finished()

    def _remove(self, process: int) -> None:
        if os.getpid() != process:
            return  # a forked child inherits this atexit function
        self._threads.clear()
        self._stop()
        _leave(self.overlay.folder)

    def _report(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        written, removed = self.overlay.changes(self._kept)
        for word, paths in (("written", written), ("removed", removed)):
            if paths:
                names = list_names(tuple(self._shown(path) for path in paths))
                print(f"not {word}: {names} ({self.command} runs the script without its writes)", flush=True)

    def _shown(self, path: str) -> str:
        cwd = os.path.realpath(self._cwd)
        return os.path.relpath(path, cwd) if is_below(path, cwd) else path


def protected_files(command: str, script: Path) -> AbstractContextManager[ProtectedFiles]:
    """Keep a script's writes away from the user's files inside the block; see `ProtectedFiles`.

    Args:
        command: Name of the command, for messages.
        script: Path of the script that the command runs.
    """
    return ProtectedFiles(command, script).running()


_protections: list[ProtectedFiles] = []
_inside = threading.local()


@contextmanager
def _unprotected() -> Iterator[None]:
    """Turn the redirection off for this thread inside the block."""
    outer, _inside.value = getattr(_inside, "value", False), True
    try:
        yield
    finally:
        _inside.value = outer


def _find() -> ProtectedFiles | None:
    if getattr(_inside, "value", False):
        return None
    return next((each for each in reversed(_protections) if each.applies()), None)


def _find_handle(name: str) -> Handle | None:
    protection = _find()
    return None if protection is None else partial(protection.handle, name)


_replaced = Replaced(_find_handle)
_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _protections and (event == "open" or event in _EVENTS) and (protection := _find()) is not None:
        protection.refuse(event, arguments)


def _add(protection: ProtectedFiles) -> None:
    if not _hooks:
        sys.addaudithook(_audit)  # Python cannot remove an audit hook
        _hooks.append(_audit)
    if not _protections:
        _replaced.install()
    if protection not in _protections:
        _protections.append(protection)


def _drop_finished() -> None:
    """Restore the original functions if no script, and no thread of a script, still runs."""
    _protections[:] = [each for each in _protections if each._is_running or any(t.is_alive() for t in each._threads)]
    if not _protections:
        _replaced.undo()


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


def _leave(folder: str) -> None:
    """Unregister this process, and remove the folder if no rank uses it any more."""
    users = Path(folder, "users")
    (users / str(os.getpid())).unlink(missing_ok=True)
    if not users.exists() or not any(users.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)
