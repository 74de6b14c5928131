"""Traced code that has no unchanged file of its own is not recorded."""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from compile_fsdp.passes.cache_key import hash_file
from compile_fsdp.replay.sources import Sources
from helpers.ranks.fresh import run_fresh

_SOURCE = "def step(x):\n    return x * 2.0\n"


@pytest.fixture(autouse=True)
def _new_hashes() -> None:
    hash_file.cache_clear()


def _module(file: Path, monkeypatch: pytest.MonkeyPatch, text: str = _SOURCE) -> CodeType:
    """Write a module that is older than this process, import it, and return its function's code."""
    file.write_text(text)
    os.utime(file, (1, 1))
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, file.stem, module)
    function = module.step
    assert isinstance(function, FunctionType)
    return function.__code__


def _sources(code: CodeType) -> Sources:
    found = Sources()
    found.add([code])
    return found


def test_code_is_identified_by_the_hash_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _sources(_module(tmp_path / "a_step.py", monkeypatch))
    assert (found.problem, list(found.hashes), found.changed()) == (None, ["a_step"], None)
    _module(tmp_path / "a_step.py", monkeypatch, _SOURCE.replace("2.0", "3.0"))
    hash_file.cache_clear()
    assert found.changed() == "a_step"


def test_file_modified_since_the_start_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _module(tmp_path / "a_step.py", monkeypatch)
    before = _sources(code)
    now = time.time() + 10.0
    os.utime(tmp_path / "a_step.py", (now, now))
    problem = _sources(code).problem
    assert problem is not None and "was modified after this process began" in problem
    assert before.changed() == "a_step"


_IN_A_NEW_PROCESS = """
import json, sys, time
from pathlib import Path

import compile_fsdp

time.sleep(0.1)
file = Path(json.loads(sys.argv[1])[0], "a_step.py")
file.write_text("def step(x): return x * 2.0")
time.sleep(0.1)
from compile_fsdp.replay import sources

found = sources.Sources()
found.add([(lambda: None).__code__])
print(json.dumps([sources._is_modified(file), found.problem]))
"""


def test_start_is_the_import_of_the_package_and_code_of_the_command_line_is_not_recorded(tmp_path: Path) -> None:
    (is_modified, problem), _ = run_fresh(_IN_A_NEW_PROCESS, str(tmp_path))
    assert is_modified is True
    assert "command line" in problem


def test_code_in_an_unreadable_file_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a zip archive has a path below the archive."""
    code = _module(tmp_path / "a_step.py", monkeypatch)
    (tmp_path / "a_step.py").unlink()
    problem = _sources(code).problem
    assert problem is not None and "no readable file" in problem


@pytest.mark.parametrize("name", ["<stdin>", "<console>", "<ipython-input-3-0123>", "<python-input-0>"])
def test_typed_code_is_not_recorded(name: str) -> None:
    problem = _sources(compile(_SOURCE, name, "exec")).problem
    assert problem is not None and "typed in" in problem


def test_generated_code_needs_no_file() -> None:
    """A dataclass's methods have the file name of a command line."""
    assert _sources(compile(_SOURCE, "<string>", "exec")).problem is None
