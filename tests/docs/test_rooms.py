"""docs/architecture.md lists every folder, and its names in code exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import compile_fsdp.ops  # noqa: F401  # defines ops in torch.ops
from helpers.pages.code_blocks import DOCS, ROOT

FOLDERS = ("compile_fsdp", "passes", "ops")

# Code spans on this page that `exists` cannot look up, such as formulas and commands.
VALUES = {
    "n",
    "ceil(d0 / n)",
    "ceil(d0 / n) * prod(rest)",
    "d0",
    "with",
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
_ROOM = re.compile(r"^\| `([^`]+/)` \|", flags=re.MULTILINE)  # a folder in a first cell of a table


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def code(page: str) -> set[str]:
    """Inline code spans of a page, without fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@cache
def words() -> set[str]:
    """All words in the package's sources."""
    return {*FOLDERS, *re.findall(r"\w+", "".join(path.read_text() for path in files()))}


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
    """Whether a code span is an existing path, a name of words in the package's sources, or a name in torch."""
    if text in VALUES or text.startswith("compile-fsdp"):
        return True
    if _PATH.fullmatch(text):
        return (ROOT / text).exists()
    head = re.split(r"[=(]", text, maxsplit=1)[0].strip()
    if not head or text.startswith("("):
        return True  # a shape
    if not _NAME.fullmatch(head):
        return False
    return words().issuperset(re.split(r"\.|::", head)) or _is_torchs(head)


def test_every_folder_is_listed_once() -> None:
    folders = {path.parent.relative_to(ROOT) for path in files()}
    own = {f"{folder.as_posix()}/" for folder in folders if len(folder.parts) < 3}  # one row for all commands
    assert own
    assert sorted(_ROOM.findall((DOCS / "architecture.md").read_text())) == sorted(own)


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
        "passes/no_such_file.py",
        "torch.no_such_name",
        "compile_fsdp::no_such_op",
        "no such thing",
    ],
)
def test_exists_rejects_missing_names_and_paths(text: str) -> None:
    assert not exists(text)
