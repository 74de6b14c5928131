"""A torch that does not fit is refused at import, with its version or the name that is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_fsdp import compat, versions
from compile_fsdp.compat import FSDPParamGroup

_REPLACED = """
import torch
{change}
import compile_fsdp
"""


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0.dev20270101+cu130", "3.0.0", "1.13.1"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ImportError, match=rf"works with torch 2\.11 to 2\.15, found torch {version.split('+')[0]}"):
        versions.check_version(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3"])
def test_versions_of_the_range_are_taken(version: str) -> None:
    versions.check_version(version)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("torch.__version__ = '2.9.1'", "works with torch 2.11 to 2.15, found torch 2.9.1"),
        ("from torch._dynamo import exc; del exc.ShortenTraceback", "cannot import name 'ShortenTraceback'"),
        ("del torch.autograd._unsafe_preserve_version_counter", "_unsafe_preserve_version_counter"),
        (
            "from torch.distributed.fsdp._fully_shard import _fsdp_state; del _fsdp_state.FSDPState._lazy_init",
            "_fully_shard._fsdp_state.FSDPState has no _lazy_init",
        ),
    ],
)
def test_import_says_what_is_missing(change: str, expected: str, tmp_path: Path) -> None:
    code = _REPLACED.format(change=change)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: compile_fsdp ") and expected in last


def test_names_that_are_used_later_are_complete() -> None:
    source = ast.parse(Path(compat.__file__).read_text())
    functions = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    imports = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    found = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    chains = {_dotted(node) for function in functions for each in function.body for node in ast.walk(each)}
    private = {name for name in chains if "._" in name.replace("torch.__version__", "")}
    found |= {name for name in private if not any(other.startswith(f"{name}.") for other in private)}
    assert {name for name in found if name.startswith("torch.")} == set(versions.USED_LATER)


def _dotted(node: ast.AST) -> str:
    """`torch.a.b` as text; "" for anything else."""
    text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    return text if re.fullmatch(r"torch(\.\w+)+", text) else ""


def test_attributes_that_no_method_sets_any_more_are_named() -> None:
    names = ("_sharded_state", "_gone", "unshard", "fsdp_placement")
    with pytest.raises(AttributeError, match=r"FSDPParamGroup has no _gone, fsdp_placement$"):
        versions.check_attributes({f"{FSDPParamGroup.__module__}.FSDPParamGroup": names})


def test_attributes_of_torch_s_objects_are_complete() -> None:
    package = Path(compat.__file__).parent
    nodes = [node for file in package.rglob("*.py") if file.name != "compat.py" for node in _walk(file)]
    ours = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
    ours |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    private = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match("_(?!_|compile_fsdp_)", node.attr)
    }
    standard_library = {"_ArgumentGroup", "_SubParsersAction", "_getframe"}
    ops = {"_c10d_functional", "_to_copy", "_unsafe_view"}
    checked = {name for names in versions.ATTRIBUTES.values() for name in names}
    assert private - ours - standard_library - ops <= checked


def _walk(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text()))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_a_name_that_has_moved_is_reported_before_the_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_names()
    monkeypatch.setattr(versions, "USED_LATER", ("torch._inductor.compile_fx.gone",))
    with pytest.raises(ImportError, match=r"torch._inductor.compile_fx' has no attribute 'gone'"):
        versions.check_names()
