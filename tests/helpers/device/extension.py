"""Build the emulated device's extension, once per source hash and torch version."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ninja
import torch

_SOURCES = Path(__file__).parent / "csrc"
_NAME = "emulated_device"
# torch 2.11 compiles extensions as C++17 by default. -w silences warnings about torch's headers.
_LOAD = """
import sys
from torch.utils import cpp_extension
flags = ["-std=c++20", "-O1", "-g0", "-w"]
cpp_extension.load(sys.argv[1], sys.argv[3:], build_directory=sys.argv[2], extra_cflags=flags)
"""


class NoCompiler(RuntimeError):
    """Raised if there is no C++ compiler to build the device."""


def build() -> Path:
    """Return the path of the extension; build it if needed.

    A build takes one or two minutes. Concurrent processes build it once.

    Raises:
        NoCompiler: if a build is needed and there is no C++ compiler.
    """
    sources = sorted(_SOURCES.iterdir())
    key = hashlib.sha256((sys.version + torch.__version__ + _LOAD).encode())
    for source in sources:
        key.update(source.name.encode() + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compile_fsdp"
    folder = cache / f"{_NAME}_{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_NAME}.so"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(folder, [str(source) for source in sources if source.suffix == ".cpp"])
    return library


@functools.cache
def load_extension() -> ModuleType:
    """Import the extension, once for each process. See `build`."""
    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(folder: Path, sources: list[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise NoCompiler(f"expected the C++ compiler {compiler} to build the emulated device; install g++ or set CXX")
    (folder / "lock").unlink(missing_ok=True)  # a killed build leaves it, and the next build would wait for it
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])  # this virtual environment's ninja
    # In a separate process, because the build loads the library.
    command = [sys.executable, "-c", _LOAD, _NAME, str(folder), *sources]
    built = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"expected the emulated device to build, got:\n{built.stdout}{built.stderr}")


if __name__ == "__main__":
    print(build())
