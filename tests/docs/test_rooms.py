"""docs/architecture.md lists every folder, and its names in code exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import compile_fsdp.ops  # noqa: F401  # defines ops in torch.ops

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("compile_fsdp", "passes", "ops")

# Code spans on this page that `exists` cannot look up, such as formulas and commands.
VALUES = {
    "n",
    "ceil(d0 / n)",
    "ceil(d0 / n) * prod(rest)",
    "d0",
    "with",
    "compile-fsdp",
    "compile-fsdp bench",
    "compile-fsdp calibrate",
    "compile-fsdp check",
    "compile-fsdp doctor",
    "compile-fsdp explain",
    "compile-fsdp plan",
    "compile-fsdp precompile",
    "python -m compile_fsdp",
    "-O",
    "m",
    "model(batch)",
    "loss.backward()",
    ".grad",
    "TORCH_FR_BUFFER_SIZE",  # torch's C++ flight recorder reads it
}

_PATH = re.compile(r"[\w./-]+/|[\w./-]+\.(?:py|md)")
_NAME = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*")
_ROOM = re.compile(r"^\| `([^`]+/)` \|", flags=re.MULTILINE)


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def listed(page: str) -> list[str]:
    """Folders in the first cells of a page's tables."""
    return _ROOM.findall(page)


def code(page: str) -> set[str]:
    """Inline code spans of a page, without fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


class Sources:
    """The names in the package's sources.

    Attributes:
        members: Names that each class or module defines, by the last part of its name.
        used: Every name that is defined, imported or read anywhere.
    """

    def __init__(self) -> None:
        self.members: defaultdict[str, set[str]] = defaultdict(set)
        self.used: set[str] = set(FOLDERS)
        for path in files():
            self._read(ast.parse(path.read_text()), path.stem)

    def _read(self, tree: ast.Module, module: str) -> None:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Name, ast.Attribute, ast.alias, ast.arg, ast.keyword)):
                self.used.update(_names(node))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.used.add(node.name)
            if isinstance(node, ast.ClassDef):
                self.members[node.name] |= _members(node)
        self.members[module] |= {name for node in tree.body for name in _defined(node)}

    def has(self, name: str) -> bool:
        """Whether the sources define or use a name; for `Owner.member`, whether the owner has the member."""
        owner, _, member = name.rpartition(".")
        if not owner:
            return name in self.used
        owner = owner.rpartition(".")[2]
        known = self.members.get(owner)
        return member in self.used and owner in self.used if known is None else member in known


def _names(node: ast.Name | ast.Attribute | ast.alias | ast.arg | ast.keyword) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return [node.asname or node.name, node.name.rpartition(".")[2]]
    return [node.arg] if node.arg is not None else []


def _members(cls: ast.ClassDef) -> set[str]:
    """Names that a class defines, and attributes that its methods set on `self`."""
    own = {name for node in cls.body for name in _defined(node)}
    attributes = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return own | {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def sources() -> Sources:
    return Sources()


def _is_torchs(name: str) -> bool:
    if name in dir(FSDPModule) or name in inspect.signature(fully_shard).parameters:
        return True
    is_op = not name.startswith("torch.")
    path = name.replace("::", ".") if is_op else name.removeprefix("torch.")
    try:
        # torch.ops creates an op's attribute on first access.
        found: object = attrgetter(path)(torch.ops if is_op else torch)
    except AttributeError:
        return False
    return not is_op or callable(found)


def exists(text: str) -> bool:
    """Whether a code span is an existing path, or a name in the package or torch."""
    if text in VALUES:
        return True
    if _PATH.fullmatch(text):
        return (ROOT / text).exists()
    head = re.split(r"[=(]", text, maxsplit=1)[0].strip()
    if not head or text.startswith("("):
        return True  # a shape
    if not _NAME.fullmatch(head):
        return False
    return sources().has(head) or _is_torchs(head)


def test_every_folder_is_listed_once() -> None:
    folders = {path.parent.relative_to(ROOT) for path in files()}
    own = {f"{folder.as_posix()}/" for folder in folders if len(folder.parts) < 3}  # one row for all commands
    assert own
    assert sorted(listed((DOCS / "architecture.md").read_text())) == sorted(own)


def test_every_file_says_what_it_does() -> None:
    assert [path for path in files() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_code_spans_of_page_exist() -> None:
    found = code((DOCS / "architecture.md").read_text())
    assert found
    assert sorted(text for text in found if not exists(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "StateHooks._traced_pre_forward",
        "no_such_name",
        "no_such_name(0)",
        "no_such_name=n",
        "passes/no_such_file.py",
        "no_such_folder/",
        "torch.no_such_name",
        "torch._dynamo.no_such_name()",
        "fsdp.no_such_op",
        "compile_fsdp::no_such_op",
        "no such thing",
    ],
)
def test_exists_rejects_missing_names_and_paths(text: str) -> None:
    assert not exists(text)


@pytest.mark.parametrize(
    "text",
    [
        "passes/pipelines.py",
        "StateHooks",
        "torch._dynamo.reset()",
        "fsdp.copy_",
        "compile_fsdp::hand_over",
        "reshard_after_forward=n",
        "(n,)",
    ],
)
def test_exists_accepts_names_paths_and_shapes(text: str) -> None:
    assert exists(text)
