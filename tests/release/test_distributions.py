"""The wheel has every file, works without the checkout, and builds reproducibly."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.releases.distributions import ROOT, build_sdist, build_wheel, copy_sources, unpack

# Folders of a checkout, and their paths in the wheel.
INSTALLED = {"compile_fsdp": "compile_fsdp", "passes": "compile_fsdp/passes", "ops": "compile_fsdp/ops"}


class Built(NamedTuple):
    """The paths of a release's two files."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module", autouse=True)
def _one_date() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1790000000")
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist, and a wheel built from the sdist, like `make dist`."""
    folder = tmp_path_factory.mktemp("built")
    copy_sources(ROOT, folder / "sources")
    sdist = build_sdist(folder / "sources", folder)
    return Built(sdist, build_wheel(unpack(sdist, folder / "unpacked"), folder))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_build_does_not_depend_on_path_dates_or_permissions(built: Built, tmp_path: Path) -> None:
    """Builds the second wheel from the sources instead of the sdist."""
    checkout = tmp_path / "checkout"
    copy_sources(ROOT, checkout)
    for path in checkout.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1_600_000_000, 1_600_000_000))
    with _umask(0o077):
        copy_sources(checkout, tmp_path / "sources")
        sdist = build_sdist(tmp_path / "sources", tmp_path)
        wheel = build_wheel(tmp_path / "sources", tmp_path)
    assert (_hash(sdist), _hash(wheel)) == (_hash(built.sdist), _hash(built.wheel))


def test_every_file_of_the_package_is_in_the_wheel(built: Built) -> None:
    """Fails if pyproject.toml omits a package or has no pattern for a data file."""
    expected = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in INSTALLED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(expected) > 150
    with zipfile.ZipFile(built.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert (sorted(expected - packed), sorted(packed - expected)) == ([], [])


@pytest.fixture(scope="module")
def place(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the installed wheel; dependencies come from the test environment."""
    folder = tmp_path_factory.mktemp("place")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), str(built.wheel)], check=True)
    return folder


def _run(place: Path, empty: Path, *command: str) -> str:
    """Run a command in `empty` with `place` on PYTHONPATH; return stdout."""
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_command_and_packages_come_from_the_wheel(place: Path, tmp_path: Path) -> None:
    """Checks both in one process, because importing torch takes most of the time."""
    code = (
        "import runpy, compile_fsdp.passes, compile_fsdp.ops\n"
        "print(compile_fsdp.passes.__file__, compile_fsdp.ops.__file__)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    script = str(place / "bin/compile-fsdp")
    prepared = f"import sys; sys.argv = [{script!r}, '--version']\n"
    files, printed = _run(place, tmp_path, sys.executable, "-c", prepared + code).splitlines()
    expected = [place / f"compile_fsdp/{name}/__init__.py" for name in ("passes", "ops")]
    assert [Path(file) for file in files.split()] == expected
    assert printed == f"compile-fsdp {version('compile-fsdp')}"


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_example_runs_on_the_installed_package(place: Path, tmp_path: Path, inner: str) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    sizes = ("--preset", "tiny", "--steps", "2", "--batch-size", "2", "--seq-len", "16")
    example = str(ROOT / "examples/train.py")
    printed = _run(place, tmp_path, *launcher, example, *sizes, "--inner-backend", inner, "--output", "out")
    assert "1 forward, 1 backward" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "summary.json"]
