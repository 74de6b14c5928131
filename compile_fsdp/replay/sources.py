"""The files whose code is in a graph."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

import compile_fsdp
from compile_fsdp.torch_compat.dynamo import traced_code

# What the versions of torch and of this project stand for.
_KNOWN = tuple(str(Path(file).parent.absolute()) + os.sep for file in (torch.__file__, compile_fsdp.__file__))


class Sources:
    """Hashes of source files, by the name of their module: another machine may keep them elsewhere.

    Attributes:
        hashes: The hashes.
        problem: Which traced code is in no module's file; None if all is.
    """

    def __init__(self) -> None:
        self.hashes: dict[str, str | None] = {}
        self.problem: str | None = None

    def add_traced_code(self) -> None:
        """While Dynamo compiles a graph: add the files of the code that it has traced into it."""
        files = {code.co_filename for code in traced_code()}
        # Generated code, as of a dataclass, follows from a file.
        files = {file for file in files if not file.startswith((*_KNOWN, "<"))}
        modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
        for file in files:
            name = modules.get(file)
            if name is None:
                self.problem = f"its code is in {file}, which is no module's"
            else:
                name = "__main__" if name == "__mp_main__" else name
                self.hashes[name] = _hash_file(file)

    def changed(self) -> str | None:
        """The first module whose file is not what it was."""
        return next((name for name, was in self.hashes.items() if _hash_file(_file_of(name)) != was), None)


def _file_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


@cache
def _hash_file(file: str | None) -> str | None:
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
