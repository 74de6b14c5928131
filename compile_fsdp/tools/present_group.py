"""Let a script's `init_process_group()` keep the process group that a command has already made.

A process can make its default process group only once. If a command has made a fake group, a script that calls
`init_process_group()`, as under torchrun, would end with an error. torch itself stays unchanged; instead, the calls in
the user's files change in memory,

    dist.init_process_group("nccl")    ->    or_present(dist.init_process_group)("nccl")

in the script and in the modules that it imports from its folder or the current folder. Installed packages stay
unchanged, because training libraries check `is_initialized()` first.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist

INIT = "init_process_group"
_INSTALLED = {"site-packages", "dist-packages"}


def or_present(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init`, or a no-op if `init` is torch's function and a fake default process group exists."""
    is_there = init is dist.init_process_group and dist.is_initialized() and dist.get_backend() == "fake"
    return _keep if is_there else init


def _keep(*args: Any, **kwargs: Any) -> None:
    """Ignore the arguments and keep the present process group."""


class _Calls(ast.NodeTransformer):
    """AST transformer that puts `or_present` around `init_process_group`, or an alias of it, in calls."""

    def __init__(self) -> None:
        self.names = {INIT}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        self.names.update(alias.asname for alias in node.names if alias.name == INIT and alias.asname)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        if name in self.names:
            function = ast.parse(f"__import__({__name__!r}, fromlist=['_']).{or_present.__name__}", mode="eval").body
            for each in (call := ast.Call(function, [], []), *ast.walk(function)):
                ast.copy_location(each, node.func)
            call.args.append(node.func)
            node.func = call
        return node


class UserFile(SourceFileLoader):
    """Loader of a user's file with wrapped calls; it stores no bytecode and keeps the line numbers."""

    def get_code(self, fullname: str) -> CodeType:
        tree = _Calls().visit(ast.parse(self.get_data(self.path), filename=self.path))
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    """Finder that loads the user's files with `UserFile` if they mention `init_process_group`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and self._is_ours(Path(spec.loader.path)):
            spec.loader = UserFile(fullname, spec.loader.path)
        return spec

    def _is_ours(self, file: Path) -> bool:
        if not any(file.is_relative_to(folder) for folder in self.folders) or _INSTALLED.intersection(file.parts):
            return False
        return INIT.encode() in file.read_bytes()


@contextmanager
def loading_user_files(script: Path) -> Iterator[None]:
    """Load modules from the script's folder and the current folder with `UserFile` inside the block."""
    finder = _Finder((script.resolve().parent, Path.cwd()))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
