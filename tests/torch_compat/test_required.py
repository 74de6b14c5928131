"""Import refuses an unsupported torch with its version or the missing name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from compile_fsdp.torch_compat import declarations, required
from compile_fsdp.torch_compat.fsdp import FSDPParamGroup

_FOLDER = Path(required.__file__).parent
_FILES = sorted(_FOLDER.glob("*.py"))

_REPLACED = """
import torch
{change}
import compile_fsdp
"""


def test_only_torch_versions_in_the_range_are_accepted() -> None:
    for version in ("2.11.0", "2.13.0+cpu", "2.15.3"):
        declarations.check_version(version)
    for version in ("2.10.0", "2.16.0.dev20270101+cu130", "3.0.0", "1.13.1"):
        with pytest.raises(ImportError, match=rf"torch 2\.11 to 2\.15, found torch {re.escape(version)}"):
            declarations.check_version(version)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("torch.__version__ = '2.9.1'", "works with torch 2.11 to 2.15, found torch 2.9.1"),
        ("from torch._dynamo import exc; del exc.ShortenTraceback", "has no attribute 'ShortenTraceback'"),
        ("del torch.autograd._unsafe_preserve_version_counter", "_unsafe_preserve_version_counter"),
        (
            "from torch.distributed.fsdp._fully_shard import _fsdp_state; del _fsdp_state.FSDPState._lazy_init",
            "_fully_shard._fsdp_state.FSDPState has no _lazy_init",
        ),
    ],
)
def test_import_error_names_unsupported_version_or_missing_name(change: str, expected: str, tmp_path: Path) -> None:
    code = _REPLACED.format(change=change)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: compile_fsdp ") and expected in last


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_each_function_declares_the_names_that_it_uses(file: Path) -> None:
    source = ast.parse(file.read_text())
    modules = _imported(source.body)
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    assert {each.name: _declared(each) for each in functions} == {each.name: _used(each, modules) for each in functions}


def _declared(function: ast.FunctionDef) -> set[str]:
    calls = [node for node in function.decorator_list if isinstance(node, ast.Call)]
    needs = [node for node in calls if ast.unparse(node.func) == "needs"]
    return {ast.literal_eval(argument) for node in needs for argument in node.args}


def _used(function: ast.FunctionDef, modules: dict[str, str]) -> set[str]:
    """Full names of a function's torch imports and private module attributes."""
    imported = _imported(ast.walk(function))
    chains = {_full_name(node, modules | imported) for each in function.body for node in ast.walk(each)}
    found = {*imported.values(), *(name for name in chains if "._" in name.replace("torch.__version__", ""))}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _imported(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Full names of torch imports, by local name."""
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("torch")]
    return {alias.asname or alias.name: f"{each.module}.{alias.name}" for each in imports for alias in each.names}


def _full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """Full name of a torch attribute such as `torch.a.b`, or ""."""
    text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    first, _, rest = text.partition(".")
    is_known = first in {"torch", *imported} and re.fullmatch(r"\w+(\.\w+)*", rest)
    return f"{imported.get(first, first)}.{rest}" if is_known else ""


def test_private_torch_names_are_used_only_in_torch_compat() -> None:
    files = [file for file in _FOLDER.parent.rglob("*.py") if file not in _FILES]
    assert len(files) > 100
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported = _imported(nodes)
        names |= {*imported.values(), *(_full_name(node, imported) for node in nodes)}
        private = {name for name in names if name.startswith("torch.") and re.search(r"\._(?!_)", name)}
        # Op names are allowed, because torch registers ops globally.
        assert {name for name in private if not name.startswith("torch.ops.")} == set(), file


def test_declared_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch._C._current_graph_task_id" in declarations.NAMES
    required.check_names()
    monkeypatch.setattr(declarations, "NAMES", [])

    def function() -> None: ...

    assert declarations.needs("torch.nn.Linear", "torch._inductor.compile_fx.gone")(function) is function
    with pytest.raises(ImportError, match=r"torch._inductor.compile_fx' has no attribute 'gone'"):
        required.check_names()


def test_late_names_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "NAMES", [])
    assert declarations.Late("torch.nn.Linear")(2, 3).out_features == 3
    required.check_names()
    declarations.Late("torch._inductor.gone")
    with pytest.raises(ImportError, match=r"torch._inductor' has no attribute 'gone'"):
        required.check_names()


def test_missing_attributes_are_named() -> None:
    names = ("_sharded_state", "_gone", "unshard", "fsdp_placement")
    with pytest.raises(AttributeError, match=r"FSDPParamGroup has no _gone, fsdp_placement$"):
        required.check_attributes({FSDPParamGroup: names})


def test_private_attributes_outside_torch_compat_are_declared() -> None:
    files = [file for file in _FOLDER.parent.rglob("*.py") if file not in _FILES]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute)]
    ours = {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == "self"}
    ours |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    standard_library = {"_ArgumentGroup", "_SubParsersAction", "_current_frames", "_getframe"}
    ops = {"_c10d_functional", "_to_copy", "_unsafe_view"}
    of_some_releases = {"_partial_reduce_output_layout", "_reset_iter_state"}
    assert _private(found) - ours - standard_library - ops - of_some_releases <= _declared_attributes()


def test_private_attributes_that_shims_use_are_declared() -> None:
    found = []
    for file in _FILES:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        found += [node for node in attributes if not _full_name(node, _imported(nodes))]
    marks = {"_dynamo_source", "_dynamo_static_indices", "_has_dynamo_dim_marking"}  # only some objects have them
    of_some_releases = {"_fsdp_param_group", "_fsdp_param_groups", "_post_backward_pending"}
    assert _private(found) - marks - of_some_releases <= _declared_attributes()


def _private(attributes: Iterable[ast.Attribute]) -> set[str]:
    return {node.attr for node in attributes if re.match("_(?!_|compile_fsdp_)", node.attr)}


def _declared_attributes() -> set[str]:
    return {name for names in declarations.ATTRIBUTES.values() for name in names}
