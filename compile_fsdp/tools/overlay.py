"""A tree of links in a temporary folder that takes a script's writes and leaves the user's files unchanged.

`TREE/home/user/runs/a.pt` is the script's version of `/home/user/runs/a.pt`. The tree starts as a link to `/`. A write
replaces the links on its path: a link to a folder by a new folder, and a link to a file by a copy. The new folder gets
links to all entries when the script lists it or removes an entry. So renames, errors and listings are the file
system's. Forked workers and the ranks of one host share the tree.

[Note: Links to the user's files]
A link to an unchanged file or folder of the user begins with `//`, which the system reads as `/`. `Overlay.find`
resolves all further links inside the tree: the script's, and copies of the user's.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_REST = "\n"  # name of the link to the user's folder, in a folder of the tree that lacks links to some entries


class Access(enum.Enum):
    """How a call uses a path."""

    READ = enum.auto()  # a file or folder
    LOOK = enum.auto()  # a symbolic link itself
    LIST = enum.auto()  # the entries of a folder
    CHANGE = enum.auto()  # a file or folder that keeps its content, as in appending
    REPLACE = enum.auto()  # the whole content of a file
    MAKE = enum.auto()  # a new entry of a folder
    REMOVE = enum.auto()  # an entry of a folder, to remove or rename it

    @property
    def writes(self) -> bool:
        return self not in (Access.READ, Access.LOOK, Access.LIST)

    @property
    def follows(self) -> bool:
        """Whether the call follows a symbolic link at the path."""
        return self not in (Access.LOOK, Access.MAKE, Access.REMOVE)

    def resolve(self, path: str) -> str:
        """Resolve the symbolic links among the user's files that the call follows."""
        if self.follows:
            return os.path.realpath(path)
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


class Overlay:
    """Places of a script's versions of files, in a tree in `folder`. Only `keep` changes the user's files."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.tree = os.path.join(self.folder, "tree")
        with self._locked():
            if not os.path.lexists(self.tree):
                os.symlink("//", self.tree)

    @property
    def is_changed(self) -> bool:
        return not os.path.islink(self.tree)

    def key(self, path: str) -> str:
        """Return the absolute path by which the script knows a path. After `os.chdir`, the path may be in the tree."""
        path = os.sep + os.path.abspath(path).lstrip(os.sep)  # abspath keeps two slashes
        return path[len(self.tree) :] or os.sep if is_below(path, self.tree) else path

    def find(self, key: str, access: Access) -> str:
        """Return the path for a call to use: in the tree if the call writes or the script has changed the path.

        Makes the tree ready for the call. The key is an absolute path.

        Raises:
            OSError: if the path leads through a file, or through a folder that cannot be read.
        """
        with self._locked():
            return self._find(key, access)

    def _find(self, key: str, access: Access, links: int = 40) -> str:
        if links == 0:  # Linux, too, follows at most 40 links
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), key)
        place, names = self.tree, [name for name in key.split(os.sep) if name]
        while True:
            source = self._source(place)
            if source is not None and not access.writes:
                theirs = os.path.join(source, *names)
                real = access.resolve(theirs)
                return theirs if real == theirs else self._find(real, access, links - 1)
            if source is not None:
                self._detach(place, source, access, is_above=bool(names))
            if (names or access.follows) and os.path.islink(place):
                target = os.path.join(os.path.dirname(place), os.readlink(place), *names)
                return self._find(self.key(target), access, links - 1)
            if not names:
                break
            place = os.path.join(place, names.pop(0))
        if access is Access.REMOVE:
            self._fill(os.path.dirname(place))
        if access in (Access.REMOVE, Access.LIST):
            self._fill(place)
        return place

    def _source(self, place: str) -> str | None:
        """The user's path that a place stands for; None if the script has changed the place."""
        if os.path.islink(place):
            link = os.readlink(place)
            return link[1:] if link.startswith("//") else None
        rest = os.path.join(os.path.dirname(place), _REST)
        if os.path.lexists(place) or not os.path.lexists(rest):
            return None
        source = os.path.join(os.readlink(rest)[1:], os.path.basename(place))
        return source if os.path.lexists(source) else None

    def _detach(self, place: str, source: str, access: Access, is_above: bool) -> None:
        """Make a place ready for an access that writes to the place, or below it if `is_above`."""
        if os.path.islink(source):
            os.symlink(os.readlink(source), place)
        elif is_above or os.path.isdir(source):
            os.stat(os.path.join(source, "."))  # raises an error if the source is no folder
            new = tempfile.mkdtemp(dir=self.folder)
            os.symlink(f"/{source}", os.path.join(new, _REST))
            if os.path.lexists(place):
                os.remove(place)
            os.rename(new, place)
        elif access is Access.CHANGE:
            new = os.path.join(tempfile.mkdtemp(dir=self.folder), "copy")
            shutil.copyfile(source, new)
            shutil.copymode(source, new)
            os.replace(new, place)
        elif access is Access.REPLACE:
            if os.path.lexists(place):
                os.remove(place)
        elif not os.path.lexists(place):
            os.symlink(f"/{source}", place)

    def _fill(self, folder: str) -> None:
        """Add links to the entries that a folder of the tree lacks."""
        if not os.path.lexists(rest := os.path.join(folder, _REST)):
            return
        source = os.readlink(rest)[1:]
        with open(self._listing(folder), "w") as listing:
            json.dump(names := os.listdir(source), listing)
        for name in names:
            if not os.path.lexists(place := os.path.join(folder, name)):
                theirs = os.path.join(source, name)
                os.symlink(os.readlink(theirs) if os.path.islink(theirs) else f"/{theirs}", place)
        os.remove(rest)

    def _listing(self, folder: str) -> str:
        """The file with the names that a folder had when the tree got links to all of its entries."""
        return os.path.join(self.folder, hashlib.sha256(os.fsencode(folder)).hexdigest())

    def keep(self, path: str) -> None:
        """Copy a file from the tree to the user's files, as the command itself has written it."""
        key = os.path.realpath(path)
        if (place := self.find(key, Access.READ)) != key and os.path.isfile(place):
            os.makedirs(os.path.dirname(key), exist_ok=True)
            shutil.copyfile(place, new := f"{key}.{os.getpid()}")
            os.replace(new, key)
            os.remove(place)
            os.symlink(f"/{key}", place)

    def changes(self, folder: str = os.sep) -> tuple[list[str], list[str]]:
        """Return the topmost paths below a folder that the script has written, and that it has removed."""
        place = f"{self.tree}{folder.rstrip(os.sep)}"
        if os.path.islink(place):
            return [], []
        names, written, removed = set(os.listdir(place)), [], []
        if _REST not in names and os.path.exists(listing := self._listing(place)):
            with open(listing) as file:
                removed = [os.path.join(folder, name) for name in json.load(file) if name not in names]
        for name in sorted(names - {_REST}):
            own, theirs = os.path.join(place, name), os.path.join(folder, name)
            if self._source(own) == theirs or _link(own) == _link(theirs) is not None:
                continue
            if os.path.islink(own) or not (os.path.isdir(own) and os.path.isdir(theirs)):
                written.append(theirs)
                continue
            below = self.changes(theirs)
            written, removed = written + below[0], removed + below[1]
        return written, removed

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(os.path.join(self.folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not unlock while a forked child has the file open


def _link(path: str) -> str | None:
    return os.readlink(path) if os.path.islink(path) else None


class Entry:
    """An `os.DirEntry` of a folder in the overlay, by the script's path."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

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


class Entries(Iterator[Entry], AbstractContextManager["Entries"]):
    """The iterator that `os.scandir` returns."""

    def __init__(self, folder: Any, names: Iterable[Any]) -> None:
        self._entries = (Entry(os.fspath(folder), name) for name in names)

    def __next__(self) -> Entry:
        return next(self._entries)

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()
