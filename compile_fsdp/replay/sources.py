"""Source files whose code is traced into a graph."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import torch

from compile_fsdp.replay import IMPORTED_S
from compile_fsdp.torch_compat.dynamo import traced_code

# Folders whose code the versions of torch and of this project identify.
KNOWN_FOLDERS = tuple(
    str(folder.absolute()) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)

# Beginnings of the file names of code that was typed in, which no file has.
_TYPED = ("<stdin>", "<console>", "<ipython-input", "<python-input")


class Sources:
    """Hashes of source files, by module name because paths differ between machines."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.problem: str | None = None  # names traced code that no file is known to have

    def add_traced_code(self) -> None:
        """Add the files of traced code, while Dynamo compiles the graph."""
        traced = traced_code()
        if not _of_command_line().isdisjoint(traced):
            self.problem = "its code is in the command line of Python"
        files = {code.co_filename for code in traced}
        modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
        for file in sorted(files):
            if file.startswith(_TYPED):
                self.problem = f"its code was typed in, as {file}"
            elif file.startswith((*KNOWN_FOLDERS, "<")):
                continue  # skip generated code, such as a dataclass's, because it derives from code in a file
            elif (name := modules.get(file)) is None:
                self.problem = f"its code is in {file}, which is no module's"
            elif (digest := _hash_file(file)) is None:
                self.problem = f"its code is in {file}, which is no readable file"
            elif _is_modified(file):
                self.problem = f"its code is in {file}, which was modified after this process began"
            else:
                self.hashes["__main__" if name == "__mp_main__" else name] = digest

    def changed(self) -> str | None:
        """Return the first module whose file has changed, in this process or since the hash; None if none has."""
        for name, was in self.hashes.items():
            file = _file_of(name)
            if _hash_file(file) != was or _is_modified(file):
                return name
        return None


def _of_command_line() -> set[CodeType]:
    """Return the code objects of the program behind `python -c`; none for other programs."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return set(_codes_in(frame.f_code)) if frame.f_code.co_filename == "<string>" else set()


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


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


def _is_modified(file: str | None) -> bool:
    """Return whether a file may have newer code than this process runs, or does not exist."""
    try:
        return file is None or os.stat(file).st_mtime > IMPORTED_S
    except OSError:
        return True
