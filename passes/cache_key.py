"""The key under which compiled graphs are cached, for all code that decides what a graph becomes."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

# The ops themselves, what rewrites graphs, what it asks torch for, who calls it, and what is traced into the graphs.
_FOLDERS = ("ops", "passes", "torch_compat", "backend", "runtime", "replay")


def cache_key(*options: object) -> str:
    """Changes with any source file of `_FOLDERS` and with what the options print, with nothing else."""
    return hashlib.sha256(json.dumps([hash_sources(), *map(repr, options)]).encode()).hexdigest()


@functools.cache
def hash_sources() -> str:
    """The hash of the code that decides on graphs; computed once, since running code does not change with its file."""
    return _hash_folders(*(f"compile_fsdp.{name}" for name in _FOLDERS))


@functools.cache
def hash_package() -> str:
    """The hash of all code of the package: what is traced into a step, and what a stored step has objects of."""
    return _hash_folders("compile_fsdp", "compile_fsdp.passes", "compile_fsdp.ops")


def _hash_folders(*names: str) -> str:
    files: dict[str, Path] = {}  # by name in the package, which a checkout keeps in other folders
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
