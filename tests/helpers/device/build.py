"""Build the extension that is the device: once for each state of its sources and each torch."""

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
# torch 2.11 compiles extensions as C++17 unless told otherwise. The warnings left out are about torch's headers.
_LOAD = """
import sys
from torch.utils import cpp_extension
flags = ["-std=c++20", "-O1", "-g0", "-w"]
cpp_extension.load(sys.argv[1], sys.argv[3:], build_directory=sys.argv[2], extra_cflags=flags)
"""


class NoCompiler(RuntimeError):
    """The device cannot be built here."""


def build() -> Path:
    """The built extension, which is built where that has not been done: a minute or two.

    Processes that ask for it at the same time build it once.

    Raises:
        NoCompiler: it has to be built, and there is no C++ compiler.
    """
    sources = sorted(_SOURCES.iterdir())
    key = hashlib.sha256((torch.__version__ + _LOAD).encode())
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
    (folder / "lock").unlink(missing_ok=True)  # left by a build that was killed, it would be waited for
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])  # ninja of this virtual environment
    # In a process of its own, for it loads the library.
    command = [sys.executable, "-c", _LOAD, _NAME, str(folder), *sources]
    built = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"expected the emulated device to build, got:\n{built.stdout}{built.stderr}")


if __name__ == "__main__":
    print(build())
