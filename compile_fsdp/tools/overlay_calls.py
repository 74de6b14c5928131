"""Redirect a script's calls that read or write files to paths of the overlay.

Each handle takes the original function and the arguments of a call, and returns the call to make instead.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from compile_fsdp.tools.overlay import Overlay, system_error

Call = Callable[[], Any]
Original = Callable[..., Any]

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NEW_FLAGS = os.O_CREAT | os.O_EXCL
_UNNAMED_FLAGS: int = getattr(os, "O_TMPFILE", 0)


@dataclass(frozen=True, slots=True)
class Place:
    """A protected path.

    Attributes:
        overlay: Overlay that finds the place of the content.
        key: Path, absolute and without symbolic links.
        is_bytes: Whether the script passed the path as bytes.
    """

    overlay: Overlay
    key: str
    is_bytes: bool

    def read(self, given: Any, follow: bool = True) -> Any:
        """Return the path to read; `given` itself if the script has not changed the path."""
        place = self.overlay.find(self.key, follow)
        return given if place == self.key else self._typed(place)

    def write(self, copy: bool) -> Any:
        """Return the path to write, see `Overlay.own`."""
        return self._typed(self.overlay.own(self.key, copy))

    def make(self) -> Any:
        """Return the path at which to make a folder, link or pipe, see `Overlay.make`."""
        return self._typed(self.overlay.make(self.key))

    def exists(self) -> bool:
        """Whether the path exists for the script."""
        return os.path.lexists(self.overlay.find(self.key))

    def require(self) -> None:
        """Raise FileNotFoundError if the path does not exist for the script."""
        if not self.exists():
            raise system_error(errno.ENOENT, self.key)

    def _typed(self, place: str) -> Any:
        return os.fsencode(place) if self.is_bytes else place


class Places(Protocol):
    """Lookup of protected paths."""

    overlay: Overlay

    def place(self, path: Any, writes: bool = False, follow: bool = True, dir_fd: int | None = None) -> Place | None:
        """Return a protected path as a `Place`; None if the path is not protected."""


def _open(places: Places, original: Original, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Call:
    opener = kwargs.get("opener", args[5] if len(args) > 5 else None)
    writes = not {*"wax+"}.isdisjoint(mode)
    place = places.place(file, writes) if opener is None else None  # an opener calls os.open, which is redirected
    if place is not None:
        if "x" in mode and place.exists():
            raise system_error(errno.EEXIST, file)
        file = place.write(copy="w" not in mode) if writes else place.read(file)
    return partial(original, file, mode, *args, **kwargs)


def _os_open(
    places: Places, original: Original, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> Call:
    writes = bool(flags & _WRITE_FLAGS)
    place = places.place(path, writes, dir_fd=dir_fd)
    if place is not None:
        if _UNNAMED_FLAGS and flags & _UNNAMED_FLAGS == _UNNAMED_FLAGS:
            path = places.overlay.folder
        elif flags & _NEW_FLAGS == _NEW_FLAGS and place.exists():
            raise system_error(errno.EEXIST, path)
        else:
            path = place.write(copy=not flags & os.O_TRUNC) if writes else place.read(path)
    return partial(original, path, flags, mode, dir_fd=dir_fd)


def _read(places: Places, original: Original, path: Any, *args: Any, **kwargs: Any) -> Call:
    follow = kwargs.get("follow_symlinks", True)
    place = places.place(path, follow=follow, dir_fd=kwargs.get("dir_fd"))
    return partial(original, path if place is None else place.read(path, follow), *args, **kwargs)


def _read_link(places: Places, original: Original, path: Any, *args: Any, **kwargs: Any) -> Call:
    place = places.place(path, follow=False, dir_fd=kwargs.get("dir_fd"))
    return partial(original, path if place is None else place.read(path, follow=False), *args, **kwargs)


def _list(places: Places, original: Original, path: Any = None) -> Call:
    place = places.place("." if path is None else path)
    if place is None or not places.overlay.is_changed(place.key):
        return partial(original, path)
    names = places.overlay.names(place.key)
    return lambda: [os.fsencode(name) for name in names] if place.is_bytes else names


def _scan(places: Places, original: Original, path: Any = None) -> Call:
    place = places.place("." if path is None else path)
    if place is None or not places.overlay.is_changed(place.key):
        return partial(original, path)
    folder = "." if path is None else os.fspath(path)
    names = places.overlay.names(place.key)
    return lambda: _Entries([_Entry(folder, os.fsencode(name) if place.is_bytes else name) for name in names])


def _set(places: Places, original: Original, path: Any, *args: Any, **kwargs: Any) -> Call:
    """Change times, modes, owners or attributes in the overlay; ignore the call for a user's file."""
    place = places.place(path, True, kwargs.get("follow_symlinks", True), kwargs.get("dir_fd"))
    if place is not None:
        place.require()
        found = place.read(path)
        if found is path:
            return lambda: None
        path = found
    return partial(original, path, *args, **kwargs)


def _truncate(places: Places, original: Original, path: Any, length: int) -> Call:
    place = places.place(path, True)
    if place is not None:
        place.require()
        path = place.write(copy=True)
    return partial(original, path, length)


def _make(places: Places, original: Original, path: Any, *args: Any, **kwargs: Any) -> Call:
    place = places.place(path, True, follow=False, dir_fd=kwargs.get("dir_fd"))
    return partial(original, path if place is None else place.make(), *args, **kwargs)


def _make_link(places: Places, original: Original, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Call:
    place = places.place(dst, True, follow=False, dir_fd=kwargs.get("dir_fd"))
    if place is None:
        return partial(original, src, dst, *args, **kwargs)
    # The target must be absolute, because the link is in the overlay. `Overlay.find` resolves the target further.
    target = places.overlay.key(os.path.join(os.path.dirname(place.key), os.fsdecode(src)))
    return partial(original, os.fsencode(target) if place.is_bytes else target, place.make())


def _copy_link(places: Places, original: Original, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Call:
    """Copy instead of making a hard link, because a write through the link would change the source."""
    place = places.place(dst, True, follow=False, dir_fd=kwargs.get("dst_dir_fd"))
    source = places.place(src, dir_fd=kwargs.get("src_dir_fd"))
    read = src if source is None else source.read(src)
    if place is None:
        return partial(original, read, dst, *args, **kwargs)
    shutil.copyfile(read, place.make())
    return lambda: None


def _remove(
    places: Places, original: Original, path: Any, *, dir_fd: int | None = None, folder: bool = False
) -> Call:
    place = places.place(path, True, follow=False, dir_fd=dir_fd)
    if place is None:
        return partial(original, path, dir_fd=dir_fd)
    places.overlay.remove(place.key, folder)
    return lambda: None


def _rename(
    places: Places,
    original: Original,
    src: Any,
    dst: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
) -> Call:
    source = places.place(src, True, follow=False, dir_fd=src_dir_fd)
    target = places.place(dst, True, follow=False, dir_fd=dst_dir_fd)
    if source is None and target is None:
        return partial(original, src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if source is not None and target is not None:
        places.overlay.move(source.key, target.key)
        return lambda: None
    if target is not None:
        if os.path.isdir(places.overlay.find(target.key)) and not os.path.isdir(src):
            raise system_error(errno.EISDIR, dst)
        if os.path.lexists(places.overlay.find(target.key)):
            places.overlay.forget(target.key)
        return partial(original, src, target.make(), src_dir_fd=src_dir_fd)
    assert source is not None
    found = source.read(src, follow=False)
    copy = shutil.copytree if os.path.isdir(found) else shutil.copy2
    copy(found, dst)
    places.overlay.forget(source.key)
    return lambda: None


def _write_torch(places: Places, original: Original, file: Any, *args: Any, **kwargs: Any) -> Call:
    place = places.place(file, True)
    return partial(original, file if place is None else str(place.write(copy=False)), *args, **kwargs)


def _write_second(places: Places, original: Original, first: Any, filename: Any, *args: Any, **kwargs: Any) -> Call:
    """Redirect a function that writes the file named by its second argument."""
    place = places.place(filename, True)
    return partial(original, first, filename if place is None else place.write(copy=False), *args, **kwargs)


def _map_torch(
    places: Places, original: Original, filename: Any, shared: bool = False, *args: Any, **kwargs: Any
) -> Call:
    place = places.place(filename, bool(shared))
    if place is not None:
        filename = place.write(copy=True) if shared else place.read(filename)
    return partial(original, filename, shared, *args, **kwargs)


def _connect(places: Places, original: Original, database: Any, *args: Any, **kwargs: Any) -> Call:
    is_path = not (isinstance(database, str) and database.startswith((":memory:", "file:"))) and database != ""
    place = places.place(database, True) if is_path else None
    return partial(original, database if place is None else place.write(copy=True), *args, **kwargs)


class _Entry:
    """An `os.DirEntry` of a folder whose entries differ between the script's view and the file system."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())


class _Entries:
    """The iterator that `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


HANDLES: dict[str, Callable[..., Call]] = {
    "open": _open,
    "os.open": _os_open,
    "os.listdir": _list,
    "os.scandir": _scan,
    "os.truncate": _truncate,
    "os.symlink": _make_link,
    "os.link": _copy_link,
    "os.remove": _remove,
    "os.unlink": _remove,
    "os.rmdir": partial(_remove, folder=True),
    "os.rename": _rename,
    "os.replace": _rename,
    "sqlite3.connect": _connect,
    "torch.writer": _write_torch,
    "torch.from_file": _map_torch,
    "torch.export_chrome_trace": _write_second,
    "safetensors.write": _write_second,
    "safetensors.read": _read,
    **{f"os.{name}": _read for name in ("stat", "access", "chdir", "statvfs", "getxattr", "listxattr")},
    **{f"os.{name}": _read_link for name in ("lstat", "readlink")},
    **{f"os.{name}": _set for name in ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr")},
    **{f"os.{name}": _make for name in ("mkdir", "mkfifo", "mknod")},
}
"""By names of `originals`."""
