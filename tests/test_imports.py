"""Imports between the package's files form no circle, type imports and imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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


def _circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Largest sets of modules that import each other, directly or through others."""
    reachable = {name: _reach(name, graph) for name in graph}
    circles = {frozenset(each for each in reached if name in reachable[each]) for name, reached in reachable.items()}
    return [set(circle) for circle in sorted(circles, key=sorted) if circle]


def _reach(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return _graph({_name(path): ast.parse(path.read_text()) for path in paths})


def test_no_file_is_on_a_circle(graph: dict[str, set[str]]) -> None:
    assert _circles(graph) == []


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
    assert _circles(_graph(files)) == [{"a", "b", "c"}]
