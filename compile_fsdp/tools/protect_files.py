"""Keeps what a script writes away from the user's files, while a command runs it for its compiled steps alone.

Writes go to an overlay in a temporary folder, and the script reads them back from there. Temporary files, the caches of
compilers and devices are written as ever. What reaches a file by a way that is not redirected (`io.FileIO`) and that
Python tells its audit hooks, is refused. Not seen are files that a library other than torch and safetensors opens in
C or C++, and other programs that the script starts.

[Note: Until the process ends]
A script is ended in the middle: its threads go on, as those of asynchronous saves do, and its atexit functions run when
the command has done its work. Both stay redirected. atexit functions run in the opposite order of their registration:
the one registered behind the script's redirects again, the one before the script's removes the overlay.
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

# Variables that name folders whose files can be made again.
_CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"),
    *("TORCH_HOME", "TORCH_TRACE", "HF_HOME", "XDG_CACHE_HOME"),
)
_HOME_CACHES = ("~/.cache", "~/.triton", "~/.nv", "~/Library/Caches")
_SYSTEM = ("/dev", "/proc", "/sys")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# The paths among the arguments of audit events that change a file.
_EVENTS = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1,
    "os.setxattr": 1, "os.removexattr": 1, "os.rename": 2,
}  # fmt: skip


class ProtectedFiles:
    """Protects the user's files from one run of a script.

    Args:
        command: For messages.
        script: Files beside it are the user's, even in a temporary folder.
    """

    def __init__(self, command: str, script: Path) -> None:
        self.command = command
        self.overlay = Overlay(_overlay_folder())
        self._cwd = os.getcwd()
        self._own = [os.path.realpath(self._cwd), os.path.realpath(script.parent)]
        self._free: tuple[list[str | None], dict[str, bool]] = ([], {})
        self._kept: set[str] = set()
        self._is_running = False
        self._threads: WeakSet[threading.Thread] = WeakSet()  # of the script, behind its end
        cache_folder()  # makes it, and sets its variable

    @contextmanager
    def running(self) -> Iterator[ProtectedFiles]:
        """Redirect what this process writes, and say afterwards which files were not written.

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
            os.chdir(self._cwd)  # the script may be in a folder of the overlay
            atexit.register(self._start)
            self._report()

    def keep(self, paths: Iterable[Path]) -> None:
        """Write files of the command's own, which it has written while the script ran, to where they belong."""
        with _unprotected():
            for path in paths:
                key = self.overlay.key(str(path))
                self._kept.add(key)
                if (place := self.overlay.find(key)) != key and os.path.isfile(place):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(place, new := f"{path}.{os.getpid()}")
                    os.replace(new, path)

    def applies(self) -> bool:
        """Whether the calling thread runs the script."""
        return self._is_running or threading.current_thread() in self._threads

    def protects(self, key: str) -> bool:
        """Whether a path, without symbolic links, is a file of the user's: the nearest folder above it decides."""
        variables = [os.environ.get(name) for name in _CACHES]
        if variables != self._free[0]:
            self._free = (variables, self._folders([each for each in variables if each]))
        folders, path = self._free[1], key
        while path not in folders:
            path = os.path.dirname(path)
        return folders[path]

    def _folders(self, caches: list[str]) -> dict[str, bool]:
        """Whether files in folders are protected."""
        temporary = {tempfile.gettempdir(): False}
        own = {folder: True for folder in self._own}
        debug = os.path.join(self._cwd, "torch_compile_debug")
        free = (*_SYSTEM, *_HOME_CACHES, *caches, debug, self.overlay.folder)
        folders = {os.sep: True} | temporary | own | {os.path.expanduser(folder): False for folder in free}
        return {os.path.realpath(folder): protects for folder, protects in folders.items()}

    def place(self, path: Any, writes: bool = False, follow: bool = True, dir_fd: int | None = None) -> Place | None:
        """The key of a protected path; None for an open file, and for a path that is not protected.

        Args:
            path: As the script gives it.
            writes: Whether it is to change. What nothing has changed is read where it is.
            follow: Whether a symbolic link stands for what it leads to.
            dir_fd: A folder that the path begins in.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or not (writes or self.overlay.table):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        key = self.overlay.key(text, follow)
        return Place(self.overlay, key, isinstance(os.fspath(path), bytes)) if self.protects(key) else None

    def handle(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the script's with paths of the overlay."""
        with _unprotected():
            call = HANDLES[name](self, original, *args, **kwargs)
        try:
            return call()
        except OSError as error:
            if isinstance(error.filename, str) and self.overlay.holds(error.filename):
                error.filename = args[0]  # the path that the script knows
            raise

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise if an audit event changes a protected file.

        Raises:
            PermissionError: it does.
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
            return  # a fork of it
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
    """Within it, a script's writes do not reach the user's files; see `ProtectedFiles`.

    Args:
        command: The name of the command, for messages.
        script: The file that it runs.
    """
    return ProtectedFiles(command, script).running()


_protections: list[ProtectedFiles] = []
_inside = threading.local()


@contextmanager
def _unprotected() -> Iterator[None]:
    """Let this thread use files as they are."""
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
        sys.addaudithook(_audit)  # for good
        _hooks.append(_audit)
    if not _protections:
        _replaced.install()
    if protection not in _protections:
        _protections.append(protection)


def _drop_finished() -> None:
    """Put the functions back once no script, and no thread of one, runs any more."""
    _protections[:] = [each for each in _protections if each._is_running or any(t.is_alive() for t in each._threads)]
    if not _protections:
        _replaced.undo()


def _overlay_folder() -> str:
    """A new temporary folder; under torchrun, the one that the ranks of this host have together."""
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
    """Remove the folder, if no other rank uses it."""
    users = Path(folder, "users")
    (users / str(os.getpid())).unlink(missing_ok=True)
    if not users.exists() or not any(users.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)
