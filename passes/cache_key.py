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
    """The hash of the code that runs; computed once, since the code does not change when a file does."""
    digest = hashlib.sha256()
    for name in _FOLDERS:
        spec = find_spec(f"compile_fsdp.{name}")
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0])
        for path in sorted(folder.glob("**/*.py")):
            content = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
