"""Code that is traced into a graph: its source files, and whether it may read the rank of its process."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import torch

from compile_fsdp.passes.analysis.function_text import codes_in
from compile_fsdp.passes.cache_key import hash_file
from compile_fsdp.replay import IMPORTED_S

# Folders whose code the versions of torch and of this project identify.
_KNOWN_FOLDERS = tuple(
    str(folder.absolute()) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)

# Beginnings of the file names of code that was typed in, which no file has.
_TYPED = ("<stdin>", "<console>", "<ipython-input", "<python-input")

# Functions and methods of torch.distributed.
_RANK_READS = frozenset(
    ("get_rank", "get_local_rank", "get_node_local_rank", "get_group_rank", "get_global_rank", "get_coordinate")
)


class Sources:
    """Hashes of source files, by module name because paths differ between machines.

    Dynamo computes ranks and coordinates in a mesh at trace time, and guards the graph by none of them. So a process of
    another rank must not replay code that may read one. Code of torch and of this project computes the same on all
    ranks, except for DTensor's. A read by another name shows only where ranks compare their graphs; see `agree`.
    """

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.problem: str | None = None  # names traced code that no file is known to have
        self.may_read_rank = self.has_dtensors = False

    def add(self, traced: Collection[CodeType]) -> None:
        """Add the files of code that is traced into a graph."""
        if not _of_command_line().isdisjoint(traced):
            self.problem = "its code is in the command line of Python"
        own = [code for code in traced if not code.co_filename.startswith(_KNOWN_FOLDERS)]
        self.may_read_rank |= any(map(_may_read_rank, own))
        modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
        for file in sorted({code.co_filename for code in own}):
            if file.startswith(_TYPED):
                self.problem = f"its code was typed in, as {file}"
            elif file.startswith("<"):
                continue  # skip generated code, such as a dataclass's, because it derives from code in a file
            elif (name := modules.get(file)) is None:
                self.problem = f"its code is in {file}, which is no module's"
            elif (digest := hash_file(file)) is None:
                self.problem = f"its code is in {file}, which is no readable file"
            elif _is_modified(file):
                self.problem = f"its code is in {file}, which was modified after this process began"
            else:
                self.hashes["__main__" if name == "__mp_main__" else name] = digest

    def changed(self) -> str | None:
        """Return the first module whose file has changed, in this process or since the hash; None if none has."""
        for name, was in self.hashes.items():
            file = _file_of(name)
            if hash_file(file) != was or _is_modified(file):
                return name
        return None


def _of_command_line() -> set[CodeType]:
    """Return the code objects of the program behind `python -c`; none for other programs."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return set(codes_in(frame.f_code)) if frame.f_code.co_filename == "<string>" else set()


def _may_read_rank(code: CodeType) -> bool:
    if not _RANK_READS.isdisjoint(code.co_names):
        return True
    return "rank" in code.co_names and any(map(_calls_rank, dis.get_instructions(code)))


def _calls_rank(instruction: dis.Instruction) -> bool:
    """Return whether an instruction loads a method `rank`, a process group's; an attribute `rank` is guarded."""
    is_method = instruction.opname == "LOAD_METHOD"
    if instruction.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
        is_method = bool((instruction.arg or 0) & 1)
    return is_method and instruction.argval == "rank"


def _file_of(name: str) -> str | None:
    if (module := sys.modules.get(name)) is not None:
        return getattr(module, "__file__", None)
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _is_modified(file: str | None) -> bool:
    """Return whether a file may have newer code than this process runs, or does not exist."""
    try:
        return file is None or os.stat(file).st_mtime > IMPORTED_S
    except OSError:
        return True
