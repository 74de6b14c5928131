"""Cache keys of compiled graphs, from the code that shapes them."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

# The ops, the passes, the torch interfaces that they use, their callers, and the code that is traced into graphs.
_FOLDERS = ("ops", "passes", "torch_compat", "backend", "runtime", "replay")


def cache_key(*options: object) -> str:
    """Hash the sources of `_FOLDERS` and the `repr` of the options."""
    return hashlib.sha256(json.dumps([hash_sources(), *map(repr, options)]).encode()).hexdigest()


@functools.cache
def hash_sources() -> str:
    """Return the hash of the code that shapes graphs, computed once: running code does not change with its file."""
    return _hash_folders(*(f"compile_fsdp.{name}" for name in _FOLDERS))


@functools.cache
def hash_file(file: str | None) -> str | None:
    """Return the hash of a file, computed once; None for no file, or one that cannot be read."""
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def hash_package() -> str:
    """Return the hash of all code of the package: a stored step is traced from it, and holds objects of it."""
    return _hash_folders("compile_fsdp", "compile_fsdp.passes", "compile_fsdp.ops")


def _hash_folders(*names: str) -> str:
    files: dict[str, Path] = {}  # by path in the package; a checkout has different folders
    for name in names:
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0])
        start = name.replace(".", "/")
        files |= {f"{start}/{path.relative_to(folder).as_posix()}": path for path in folder.glob("**/*.py")}
    digest = hashlib.sha256()
    for file, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{file} {len(content)}\n".encode() + content)
    return digest.hexdigest()
