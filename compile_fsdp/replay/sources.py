"""Source files whose code is traced into a graph."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from compile_fsdp.torch_compat.dynamo import traced_code

# Folders whose code the versions of torch and of this project identify.
_KNOWN = tuple(str(folder.absolute()) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class Sources:
    """Hashes of source files, by module name because paths differ between machines."""

    def __init__(self) -> None:
        self.hashes: dict[str, str | None] = {}  # None for a file that cannot be read
        self.problem: str | None = None  # names traced code outside of all modules' files

    def add_traced_code(self) -> None:
        """Add the files of traced code, while Dynamo compiles the graph."""
        files = {code.co_filename for code in traced_code()}
        # Skip generated code, such as a dataclass's, because it derives from code in a file.
        files = {file for file in files if not file.startswith((*_KNOWN, "<"))}
        modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
        for file in files:
            if (name := modules.get(file)) is None:
                self.problem = f"its code is in {file}, which is no module's"
            else:
                self.hashes["__main__" if name == "__mp_main__" else name] = _hash_file(file)

    def changed(self) -> str | None:
        """Return the first module whose file has changed; None if none has."""
        return next((name for name, was in self.hashes.items() if _hash_file(_file_of(name)) != was), None)


def _file_of(name: str) -> str | None:
    if (module := sys.modules.get(name)) is not None:
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
