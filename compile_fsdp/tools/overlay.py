"""An overlay folder for a script's writes, which leaves the user's files unchanged.

The script reads its own files back. A table maps each path that the script has changed to the place of its content: a
file or folder in the overlay, a path of the user's that the script has renamed, or None if the script has removed the
path. A path without an entry follows its nearest parent with an entry. The table is a file, because forked workers and
the ranks of one host share it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Table = dict[str, str | None]
"""By absolute path without symbolic links: where its content is, None for a removed file."""


def _prefixes(path: str) -> Iterator[str]:
    """Yield the path, then its parents up to the root."""
    while True:
        yield path
        parent = os.path.dirname(path)
        if parent == path:
            return
        path = parent


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def system_error(number: int, path: Any) -> OSError:
    """Make the OSError of an error number; Python picks the subclass, such as `FileNotFoundError`."""
    return OSError(number, os.strerror(number), path)


class Overlay:
    """Map from a script's paths to the places of their content. No method changes the user's files.

    Args:
        folder: Holds the files and the table. Processes that use one folder share the script's view.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._table_file = os.path.join(self.folder, "table")
        self._known: tuple[int, int] | None = None
        self._table: Table = {}

    @property
    def table(self) -> Table:
        """The table as the last writing process left it."""
        try:
            status = os.stat(self._table_file)
        except FileNotFoundError:
            return self._table
        if (version := (status.st_ino, status.st_mtime_ns)) != self._known:
            self._table = pickle.loads(Path(self._table_file).read_bytes())
            self._known = version
        return self._table

    def key(self, path: str, follow: bool = True) -> str:
        """Return the table's key for a path: absolute and without symbolic links.

        Args:
            path: The path that the script passes.
            follow: Whether to resolve the last component if it is a symbolic link.
        """
        path, table = os.path.abspath(path), self.table
        for prefix in reversed(list(_prefixes(path))):
            if prefix in table:
                return path  # the system follows links below `prefix`, at the place in the table
            if (follow or prefix != path) and os.path.islink(prefix):
                target = os.path.realpath(prefix)
                return path if target == prefix else self.key(target + path[len(prefix) :], follow)
        return path

    def find(self, key: str, follow: bool = True) -> str:
        """Return the place of a path's content; a missing path if the script has removed the content."""
        table = self.table
        for prefix in _prefixes(key):
            if prefix in table:
                place = table[prefix]
                if place is None:
                    return os.path.join(self.folder, "removed", key.lstrip(os.sep))
                return self._behind_links(place + key[len(prefix) :], follow)
        return key

    def _behind_links(self, place: str, follow: bool) -> str:
        """Return the place, or its target if it leads out of the overlay through a link."""
        folder, name = os.path.split(place)
        real = os.path.realpath(place) if follow else os.path.join(os.path.realpath(folder), name)
        if self.holds(place) and not self.holds(real):
            return self.find(real, follow)
        return place

    def holds(self, place: str) -> bool:
        """Whether a place is in the overlay, so that it may be written."""
        return is_below(place, self.folder)

    def names(self, key: str) -> list[str]:
        """Return the names that the script sees in a folder.

        Raises:
            OSError: if the script sees no folder there.
        """
        children = {os.path.basename(path): place for path, place in self.table.items() if os.path.dirname(path) == key}
        there = dict.fromkeys(os.listdir(self.find(key)))
        there.update(dict.fromkeys(name for name, place in children.items() if place is not None))
        return [name for name in there if name not in children or children[name] is not None]

    def is_changed(self, key: str) -> bool:
        """Whether the listing of a folder, or the place of an entry, differs from the user's folder."""
        return self.find(key) != key or any(os.path.dirname(path) == key for path in self.table)

    def own(self, key: str, copy: bool) -> str:
        """Return a place in the overlay that takes the writes to a file.

        Args:
            key: Key of the file, which need not exist.
            copy: Whether a new place starts with the file's content, for example for appending.
        Raises:
            OSError: if the file's folder does not exist, or the path is a folder.
        """
        place = self.find(key)
        is_removed = self.table.get(key, place) is None
        if self.holds(place) and not is_removed and os.path.isdir(os.path.dirname(place)) and not os.path.isdir(place):
            return place
        if os.path.isdir(place):
            raise system_error(errno.EISDIR, key)
        new = self.new_place(key)
        if copy and os.path.exists(place):
            shutil.copyfile(place, new)
            shutil.copymode(place, new)
        return self._enter(key, new)

    def new_place(self, key: str) -> str:
        """Make an unused path in the overlay that ends in the name of the key.

        Raises:
            OSError: if the script sees no folder at the parent of the key.
        """
        parent = os.path.dirname(key)
        if not os.path.isdir(self.find(parent)):
            raise system_error(errno.ENOTDIR if os.path.lexists(self.find(parent)) else errno.ENOENT, key)
        return os.path.join(tempfile.mkdtemp(dir=self.folder), os.path.basename(key))

    def _enter(self, key: str, place: str) -> str:
        with self._changing() as table:
            table[key] = place
        return place

    def make(self, key: str) -> str:
        """Enter a new path in the overlay for a folder, link or pipe that the script makes.

        Raises:
            OSError: if the key exists already, or its parent folder does not.
        """
        if os.path.lexists(self.find(key, follow=False)):
            raise system_error(errno.EEXIST, key)
        return self._enter(key, self.new_place(key))

    def remove(self, key: str, folder: bool) -> None:
        """Remove a file or an empty folder from the script's view.

        Args:
            key: Key of the file or folder.
            folder: Whether the key must be a folder; if False, it must not be.
        Raises:
            OSError: if the key does not exist, contradicts `folder`, or is a folder with entries.
        """
        place = self.find(key, follow=False)
        if not os.path.lexists(place):
            raise system_error(errno.ENOENT, key)
        is_folder = os.path.isdir(place) and not os.path.islink(place)
        if is_folder != folder:
            raise system_error(errno.ENOTDIR if folder else errno.EISDIR, key)
        if folder and self.names(key):
            raise system_error(errno.ENOTEMPTY, key)
        self.forget(key)
        if self.holds(place) and not is_folder:
            os.unlink(place)

    def forget(self, key: str) -> None:
        """Remove a path and everything below it from the script's view."""
        with self._changing() as table:
            for path in [path for path in table if is_below(path, key)]:
                del table[path]
            table[key] = None

    def move(self, source: str, target: str) -> None:
        """Rename a file or folder in the script's view.

        Raises:
            OSError: if the source or the target's folder does not exist, or the source cannot replace the target.
        """
        place, replaced = self.find(source, follow=False), self.find(target, follow=False)
        if not os.path.lexists(place):
            raise system_error(errno.ENOENT, source)
        if not os.path.isdir(self.find(os.path.dirname(target))):
            raise system_error(errno.ENOENT, target)
        if source == target:
            return
        if os.path.isdir(replaced) and not os.path.islink(replaced):
            if not os.path.isdir(place):
                raise system_error(errno.EISDIR, target)
            if self.names(target):
                raise system_error(errno.ENOTEMPTY, target)
        with self._changing() as table:
            below = {path: table[path] for path in table if is_below(path, source)}
            for path in [path for path in table if is_below(path, source) or is_below(path, target)]:
                del table[path]
            table.update({target + path[len(source) :]: each for path, each in below.items()})
            table[target], table[source] = place, None

    def changes(self, kept: Iterable[str] = ()) -> tuple[list[str], list[str]]:
        """Return the paths that the script has written, and the user's paths that it has removed.

        Paths below a returned path are left out.

        Args:
            kept: Files that the command has copied to the user's folders; these and their parents are left out.
        """
        table, kept = self.table, list(kept)
        written = [path for path, place in table.items() if place is not None and os.path.lexists(place)]
        written = [path for path in written if not any(is_below(each, path) for each in kept)]
        removed = [path for path, place in table.items() if place is None and os.path.lexists(path)]
        return _topmost(written), _topmost(removed)

    @contextmanager
    def _changing(self) -> Iterator[Table]:
        """Yield a copy of the table under a file lock, then store the copy."""
        with open(os.path.join(self.folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = dict(self.table)
            yield table
            new = f"{self._table_file}.{os.getpid()}"
            Path(new).write_bytes(pickle.dumps(table))
            os.replace(new, self._table_file)


def _topmost(paths: list[str]) -> list[str]:
    known = set(paths)
    return [path for path in paths if known.isdisjoint(list(_prefixes(path))[1:])]
