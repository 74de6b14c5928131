"""docs/errors.md has one entry per exception, with messages that match strings of the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import compile_fsdp
from helpers.pages.code_blocks import DOCS

# Templates need this much fixed text, because shorter ones match unrelated messages.
FIXED_CHARACTERS = 20


def _exceptions() -> dict[str, type[BaseException]]:
    """Every public exception class of the package, by name."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(compile_fsdp.__path__, "compile_fsdp.")
        if not info.name.endswith("__main__")
    ]
    return {
        name: value
        for module in modules
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, BaseException) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _entries() -> dict[str, str]:
    """Text below the heading of each exception, by name."""
    parts = re.split(r"^### `(\w+)`$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    return {name: text.partition("\n## ")[0] for name, text in zip(parts[1::2], parts[2::2], strict=True)}


ENTRIES = _entries()


def _templates() -> Iterator[re.Pattern[str]]:
    """Yield a pattern for each string of the package; a formatted value matches any text."""
    for path in compile_fsdp.__path__ + importlib.import_module("compile_fsdp.ops").__path__:
        for file in Path(path).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                fixed = [p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else None for p in parts]
                if sum(len(text) for text in fixed if text) >= FIXED_CHARACTERS:
                    yield re.compile("".join(".*" if text is None else re.escape(text) for text in fixed))


def test_every_exception_has_an_entry_and_no_entry_is_stale() -> None:
    assert set(ENTRIES) == set(_exceptions())


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_entry_has_cause_example_and_remedy(name: str) -> None:
    text = ENTRIES[name]
    if "never raised itself" in text:
        assert _exceptions()[name].__subclasses__()
    else:
        assert "**Raised**" in text or "A warning, given by" in text
        assert "**Remedy.**" in text
        assert "```text\n" in text


@pytest.fixture(scope="module")
def templates() -> list[re.Pattern[str]]:
    return list(_templates())


@pytest.mark.parametrize("name", sorted(name for name, text in ENTRIES.items() if "```text" in text))
def test_example_matches_a_message_of_the_package(name: str, templates: list[re.Pattern[str]]) -> None:
    for message in re.findall(r"```text\n(.*?)\n```", ENTRIES[name], flags=re.DOTALL):
        line = message.replace("\n", " ")
        assert any(template.fullmatch(line) for template in templates), line
