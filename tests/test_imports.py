"""Imports between the package's files form no circle, type imports and imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("compile_fsdp", "passes", "ops")


def _name(path: Path) -> str:
    """Import path of a file; `passes/` and `ops/` install inside the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts if parts[0] == "compile_fsdp" else ("compile_fsdp", *parts)
    return ".".join(inside).removesuffix(".__init__")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Import paths that any statement of a file names, of modules or of names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _module(name: str, files: Mapping[str, ast.Module]) -> str | None:
    """The module that an import path names, itself or one of its names; None for another package's."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in files), None)


def _graph(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    graph = {}
    for name, tree in files.items():
        found = {_module(each, files) for each in _imported(tree)}
        graph[name] = {each for each in found if each is not None and each != name}
    return graph


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules that each import the next one, from one module back to itself; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return _graph({_name(path): ast.parse(path.read_text()) for path in paths})


def test_no_file_is_on_a_circle(graph: dict[str, set[str]]) -> None:
    assert _circle(graph) == []


@pytest.mark.parametrize(("room", "above"), [("runtime", ("backend", "replay")), ("backend", ("replay",))])
def test_room_imports_no_room_above(room: str, above: tuple[str, ...], graph: dict[str, set[str]]) -> None:
    files = {name: imported for name, imported in graph.items() if name.startswith(f"compile_fsdp.{room}.")}
    assert len(files) > 15
    refused = tuple(f"compile_fsdp.{each}" for each in above)
    assert [(name, each) for name, imported in files.items() for each in imported if each.startswith(refused)] == []


def test_circles_through_types_and_functions_are_found() -> None:
    sources = {
        "a": "if TYPE_CHECKING:\n    from b import B",
        "b": "def f():\n    import c",
        "c": "from a import A",
        "d": "from a import A",
    }
    files = {name: ast.parse(source) for name, source in sources.items()}
    assert {*_circle(_graph(files))} == {"a", "b", "c"}
