"""`compile-fsdp doctor` finds faults that the tests cause, and names a remedy."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_fsdp.cli import main
from compile_fsdp.tools import launch
from compile_fsdp.tools.doctor import checks, command
from compile_fsdp.tools.doctor.checks import Row, State
from compile_fsdp.torch_compat import declarations, dynamo

ROOT = Path(__file__).parents[3]
COMMAND = str(Path(sys.executable).with_name("compile-fsdp"))
EVERY = [*command.FIRST, *command.THEN]

# Metadata of an installation without entry points.
INCOMPLETE = """\
Metadata-Version: 2.4
Name: compile-fsdp
Version: 0.0.1
Requires-Python: >=3.10
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def examine(command: list[str], folder: Path, changed: Mapping[str, str], status: int = 1) -> dict[str, dict[str, Any]]:
    """Run `doctor --json` in `folder` with changed environment variables; return rows by check."""
    environment = {**os.environ, **changed}
    done = subprocess.run(
        [*command, "doctor", "--json"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return {row.pop("check"): row for row in json.loads(done.stdout)}


def states(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: row["state"] for name, row in rows.items()}


def test_no_check_is_a_fault_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in rows] == EVERY
    assert {row["state"] for row in rows} <= {"ok", "warning"}
    assert all(row["found"] for row in rows)


def test_machine_and_installation_faults_have_remedies(tmp_path: Path) -> None:
    (tmp_path / "path/compile_fsdp-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "path/compile_fsdp-0.0.1.dist-info/METADATA").write_text(INCOMPLETE)
    rows = examine(
        [COMMAND],
        tmp_path,
        {"CXX": "/nowhere/g++", "GLOO_SOCKET_IFNAME": "nosuch0", "PYTHONPATH": str(tmp_path / "path")},
    )
    faults = {"Dynamo", "C++ compiler", "process groups"}
    assert {name for name, state in states(rows).items() if state == "fault"} == faults
    assert "/nowhere/g++" in rows["C++ compiler"]["found"] and "CXX" in rows["C++ compiler"]["remedy"]
    assert "gloo does not start" in rows["process groups"]["found"]
    assert "GLOO_SOCKET_IFNAME" in rows["process groups"]["remedy"]
    assert "no entry point" in rows["Dynamo"]["found"] and "pip install" in rows["Dynamo"]["remedy"]


def test_cache_folder_that_cannot_be_created_is_a_fault(tmp_path: Path) -> None:
    """torch's compilers create the folder at import, so the package cannot be imported."""
    (tmp_path / "file").touch()
    rows = examine([COMMAND], tmp_path, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file/below")})
    before = EVERY[: EVERY.index("compiler cache")]
    behind = EVERY[len(before) + 1 :]
    expected = {**dict.fromkeys(before, "ok"), "compiler cache": "fault", **dict.fromkeys(behind, "unchecked")}
    assert states(rows) == expected
    assert str(tmp_path / "file/below") in rows["compiler cache"]["found"]
    assert "TORCHINDUCTOR_CACHE_DIR" in rows["compiler cache"]["remedy"]


@pytest.mark.parametrize(
    ("source", "found", "remedy"),
    [
        ("__version__ = '2.10.0'", "works with torch 2.11 to 2.15, found torch 2.10.0", "torch>=2.11,<2.16"),
        ("__version__ = '2.16.1+cu130'", "found torch 2.16.1+cu130", "torch>=2.11,<2.16"),
        ("raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open", "install torch again"),
        ("raise ModuleNotFoundError('No module named torch')", "No module named torch", "install torch again"),
    ],
    ids=["old", "new", "broken", "missing"],
)
def test_unsupported_torch_is_a_fault_row(source: str, found: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "path/torch").mkdir(parents=True)
    (tmp_path / "path/torch/__init__.py").write_text(source)
    variables = {"PYTHONPATH": str(tmp_path / "path")}
    rows = examine([COMMAND], tmp_path, variables)
    assert list(rows) == EVERY
    assert found in rows["torch"]["found"] and remedy in rows["torch"]["remedy"]
    expected = {**dict.fromkeys(EVERY, "unchecked"), "package": "ok", "Python": "ok", "torch": "fault"}
    assert states(rows) == expected
    assert examine([sys.executable, "-m", "compile_fsdp"], tmp_path, variables) == rows
    # Every other command fails with this torch, and so does a different program with the argument `doctor`.
    (tmp_path / "path/other").mkdir()
    (tmp_path / "path/other/__init__.py").write_text("import compile_fsdp")
    environment = {**os.environ, **variables}
    for words in ([COMMAND, "plan"], [sys.executable, "-m", "other", "doctor"]):
        other = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert other.returncode == 1 and found in other.stderr


def test_a_checkout_imports_in_place() -> None:
    program = "import compile_fsdp; from compile_fsdp import ops, passes; print(compile_fsdp.__file__, passes, ops)"
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    for file in ("compile_fsdp/__init__.py", "passes/__init__.py", "ops/__init__.py"):
        assert str(ROOT / file) in output.stdout


def test_an_old_python_is_a_fault() -> None:
    assert checks.check_python((3, 9)) == Row(State.FAULT, "3.9, older than 3.10", "install Python 3.10 or later")
    assert checks.check_python((3, 10)).state is State.OK


def test_python_unsupported_by_dynamo_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "why_dynamo_refuses", lambda: "Python 3.19+ not yet supported")
    row = checks.check_dynamo()
    assert (row.state, row.found) == (State.FAULT, "Python 3.19+ not yet supported")
    assert row.remedy


def test_backend_that_fails_to_import_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "compile_fsdp-0.0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(INCOMPLETE)
    (folder / "entry_points.txt").write_text("[torch_dynamo_backends]\ncompile_fsdp = compile_fsdp.gone:backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    row = checks.check_dynamo()
    assert row.state is State.FAULT
    assert "No module named 'compile_fsdp.gone'" in row.found and "pip install" in row.remedy


def test_compiler_error_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    lines = ("#!/bin/sh", "echo In file included from >&2", "echo fatal error: Python.h: No such file >&2", "exit 1")
    compiler.write_text("\n".join(lines))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    assert checks.try_compiler(str(compiler)) == "fatal error: Python.h: No such file"


def test_missing_compiler_or_missing_output_is_reported() -> None:
    assert "sample.so" in (checks.try_compiler("true") or "")
    assert "No such file" in (checks.try_compiler("no-such-compiler") or "")


@pytest.mark.parametrize(
    ("names", "built_for", "has_triton", "state", "text"),
    [
        ([], None, False, State.OK, "CPU: "),
        ([], "13.0", True, State.WARNING, "built for CUDA 13.0 and finds no device"),
        (["H100"] * 8, "13.0", True, State.OK, "cuda: 8 x H100, 80 GiB; CPU: "),
        (["H100"], "13.0", False, State.FAULT, "no Triton"),
    ],
    ids=["cpu", "no driver", "gpus", "no triton"],
)
def test_device_row_reports_accelerators_and_faults(
    names: list[str], built_for: str | None, has_triton: bool, state: State, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda") if names else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "xpu", None)
    monkeypatch.setattr(checks, "find_spec", lambda name: has_triton or None)
    row = checks.check_devices()
    assert row.state is state
    assert text in row.found
    assert (row.remedy == "") == (state is State.OK)


def test_missing_process_group_backend_is_a_fault() -> None:
    row = checks.check_process_groups(["mpi"])
    assert (row.state, row.found) == (State.FAULT, "mpi; no gloo")


def test_missing_fake_process_group_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world_size: int, rank: int) -> None:
        raise ImportError("No module named torch.testing")

    monkeypatch.setattr(launch, "init_fake_process_group", refuse)
    assert checks.check_fake_group().state is State.FAULT


@pytest.mark.skipif(sys.platform != "linux", reason="nobody may write to this folder of Linux")
def test_unwritable_cache_folder_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc")
    row = checks.check_cache_folder()
    assert row.state is State.FAULT
    assert "/proc" in row.found and "TORCHINDUCTOR_CACHE_DIR" in row.remedy


def test_low_disk_space_is_a_warning(cache: Path) -> None:
    row = checks.check_cache_folder(least_free_bytes=2**70)
    assert row.state is State.WARNING
    assert row.found.startswith(str(cache))
    assert checks.check_cache_folder(least_free_bytes=1).state is State.OK


def test_unexpected_error_in_a_check_is_a_fault_of_that_row() -> None:
    def fail() -> Row:
        raise KeyError("what nobody expected")

    rows = command.run_checks({}, {"one": fail, "other": lambda: Row(State.OK, "fine")})
    assert rows["one"].state is State.FAULT
    assert "KeyError: 'what nobody expected'" in rows["one"].found
    assert rows["other"].state is State.OK


def test_doctor_prints_every_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A private name of torch is missing, so later checks do not run."""
    monkeypatch.setattr(declarations, "NAMES", ["torch._inductor.compile_fx.gone"])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for part in (*EVERY, "fault", "gone", "remedy: ", "2.13.0", "1 fault, 0 warnings"):
        assert part in out
    assert out.count("unchecked") == len(command.THEN)


def test_faults_and_warnings_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    states = [State.FAULT, State.FAULT, State.WARNING]
    command.print_rows({str(index): Row(state, "") for index, state in enumerate(states)})
    assert capsys.readouterr().out.splitlines()[-1] == "2 faults, 1 warning"
