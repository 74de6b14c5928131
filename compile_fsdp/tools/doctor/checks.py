"""Checks of an installation: this package, Python, torch, caches, the C++ compiler, devices and process groups.

They import what they need themselves. See [Note: A doctor for a failing import].
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compile_fsdp.torch_compat import declarations

DISTRIBUTION, PACKAGE = "compile-fsdp", "compile_fsdp"

COMPILE_LIMIT_S = 120.0

# Needs Python's headers, the standard library and OpenMP, as Inductor's CPU kernels do.
SAMPLE = """\
#include <Python.h>
#include <cmath>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" double root(double x) { return std::sqrt(x); }
"""


class State(enum.Enum):
    """Outcome of a check; only faults count for the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNCHECKED = "unchecked"  # because of a fault above


@dataclass(frozen=True, slots=True)
class Row:
    state: State
    found: str  # one line
    remedy: str = ""  # empty if there is nothing to do


def check_package() -> Row:
    """Check that the package is installed, and show the folder that it runs from."""
    folder = Path(__file__).parents[2]
    try:
        return Row(State.OK, f"{metadata.version(DISTRIBUTION)} in {folder}")
    except metadata.PackageNotFoundError:
        return Row(State.FAULT, f"{folder} was copied, not installed", "install the package with pip")


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Row:
    """Check that the package supports this release of Python."""
    needed = metadata.metadata(DISTRIBUTION)["Requires-Python"].removeprefix(">=")
    if version < tuple(int(part) for part in needed.split(".")):
        shown = ".".join(map(str, version))
        return Row(State.FAULT, f"{shown}, older than {needed}", f"install Python {needed} or later")
    return Row(State.OK, f"{sys.version.split()[0]}, {sys.executable}")


def check_torch() -> Row:
    """Check that torch can be imported, and that the package supports its release."""
    try:
        import torch

        declarations.check_version(torch.__version__)
    except (ImportError, OSError) as error:  # OSError if a shared library of torch is missing
        found, _, remedy = str(error).partition("; ")
        return Row(State.FAULT, found, remedy or "install torch again")
    return Row(State.OK, torch.__version__)


def check_private_names() -> Row:
    """Check that torch has all private names and attributes that the package uses."""
    try:
        from compile_fsdp.torch_compat import required

        required.check_names()
    except ImportError as error:
        found, _, remedy = str(error).partition("; ")
        return Row(State.FAULT, found, remedy or "install a release of torch that the package is for")
    attributes = sum(len(names) for names in declarations.ATTRIBUTES.values())
    return Row(State.OK, f"{len(declarations.NAMES)} names and {attributes} attributes, all there")


def check_dynamo() -> Row:
    """Check that Dynamo supports this interpreter and finds the backend `compile_fsdp` by its entry point."""
    import torch

    from compile_fsdp.torch_compat.dynamo import why_dynamo_refuses

    if (reason := why_dynamo_refuses()) is not None:
        return Row(State.FAULT, reason, "use another Python: without Dynamo, models train eagerly alone")
    remedy = f"install the package again: pip install --force-reinstall --no-deps, with what {DISTRIBUTION} came from"
    if PACKAGE not in torch.compiler.list_backends():
        return Row(State.FAULT, f"no entry point registers the backend {PACKAGE}", remedy)
    try:
        for point in metadata.entry_points(group="torch_dynamo_backends", name=PACKAGE):
            point.load()
    except (ImportError, AttributeError) as error:
        return Row(State.FAULT, f"the backend {PACKAGE} cannot be loaded: {error}", remedy)
    return Row(State.OK, f"has the backend {PACKAGE}")


def check_cache_folder(least_free_bytes: int = 2**30) -> Row:
    """Check that Inductor can write to its cache folder."""
    remedy = "name a folder that you may write to in the variable TORCHINDUCTOR_CACHE_DIR"
    try:
        # torch makes the folder when its compilers are imported.
        from compile_fsdp.torch_compat.inductor import cache_folder

        folder = cache_folder()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except ImportError:
        return Row(State.UNCHECKED, "see private names")
    except OSError as error:
        return Row(State.FAULT, str(error), remedy)
    from compile_fsdp.passes.text import format_bytes

    free = shutil.disk_usage(folder).free
    text = f"{folder}, {format_bytes(free)} free"
    if free < least_free_bytes:  # a compiler without disk space stops a job in the middle
        return Row(State.WARNING, text, f"delete old files in it, or {remedy}")
    return Row(State.OK, text)


def check_compiler() -> Row:
    """Check that Inductor's C++ compiler makes a library that can be loaded."""
    import torch

    from compile_fsdp.torch_compat.inductor import cpp_compiler

    try:
        compiler = cpp_compiler()
        problem = try_compiler(compiler)
    except (RuntimeError, OSError) as error:
        compiler, problem = "", str(error).splitlines()[0]
    if problem is None:
        return Row(State.OK, compiler)
    # Triton makes the kernels for accelerators and needs only a C compiler.
    state = State.WARNING if torch.accelerator.is_available() else State.FAULT
    remedy = "install g++ or clang++ and the headers of Python (python3-dev), or name a compiler in the variable CXX; "
    remedy += "without one, the option inner_backend='aot_eager' runs graphs op by op"
    return Row(state, f"{compiler}: {problem}" if compiler else problem, remedy)


def try_compiler(compiler: str) -> str | None:
    """Compile, load and call a few lines; return the problem, None if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sample.cpp"), Path(folder, "sample.so")
        source.write_text(SAMPLE)
        flags = ["-shared", "-fPIC", *(["-fopenmp"] if sys.platform == "linux" else [])]
        command = [compiler, *flags, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                return errors[0] if errors else f"it ended with status {done.returncode}"
            root = ctypes.CDLL(str(library)).root
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        root.restype, root.argtypes = ctypes.c_double, [ctypes.c_double]
        return None if root(4.0) == 2.0 else "its compiled code returns wrong results"


def check_devices() -> Row:
    """List the devices, and check that Inductor can compile for them."""
    import torch

    from compile_fsdp.passes.text import format_bytes

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = f"CPU: {os.cpu_count()} cores, {format_bytes(memory)}"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
        if built_for := [f"{kind} {version}" for kind, version in versions.items() if version]:
            found = f"{cpu}; torch is built for {built_for[0]} and finds no device"
            remedy = "none on a host without one; else see that the driver is there and of this version"
            return Row(State.WARNING, found, remedy)
        return Row(State.OK, cpu)
    module: Any = torch.get_device_module(device)
    names: Counter[str] = Counter()
    for index in range(torch.accelerator.device_count()):
        name = getattr(module, "get_device_name", lambda _: device.type)(index)
        size = getattr(getattr(module, "get_device_properties", lambda _: None)(index), "total_memory", None)
        names[name if size is None else f"{name}, {format_bytes(size)}"] += 1
    listed = "; ".join(f"{count} x {name}" for name, count in names.items())  # as in `8 x H100, 80 GiB`
    text = f"{device.type}: {listed}; {cpu}"
    if device.type in ("cuda", "xpu") and find_spec("triton") is None:
        return Row(State.FAULT, f"{text}; no Triton", "install the triton that this build of torch asks for")
    return Row(State.OK, text)


def check_process_groups(available: Collection[str] | None = None) -> Row:
    """Check that each device has a backend among the available ones, and that gloo can open a connection."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Row(State.FAULT, "torch is built without torch.distributed", "install another build of torch")
    if available is None:
        names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        available = [name for name in names if dist.is_backend_available(name)]
    device = torch.accelerator.current_accelerator(check_available=True)
    types = ("cpu",) if device is None else (device.type, "cpu")
    needed = [dist.get_default_backend_for_device(each) for each in types]
    text = ", ".join(available) or "none"
    if missing := [name for name in needed if name not in available]:
        return Row(State.FAULT, f"{text}; no {', '.join(missing)}", "install a build of torch with it")
    if (problem := _try_gloo()) is not None:
        remedy = "set GLOO_SOCKET_IFNAME to a network interface that reaches the other ranks"
        return Row(State.FAULT, f"{text}; gloo does not start: {problem}", remedy)
    return Row(State.OK, text)


def _try_gloo() -> str | None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # by the caller
        return None
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None


def check_fake_group() -> Row:
    """Check that this process can join a fake process group, as commands without torchrun do."""
    import torch
    import torch.distributed as dist

    from compile_fsdp.tools.launch import fake_world

    try:
        with fake_world(2):
            dist.all_reduce(torch.ones(1))
    except (ImportError, RuntimeError, ValueError) as error:
        remedy = "run compile-fsdp check and explain under torchrun; plan and precompile need another build of torch"
        return Row(State.FAULT, str(error).splitlines()[0], remedy)
    return Row(State.OK, "opens")
