"""An H100 for the compiler: fake CUDA tensors, real Triton kernels, nothing launched.

Real: Dynamo, compiled autograd, AOTAutograd, the passes, Inductor, Triton's compilation to machine code for compute
capability 9.0, and the Python wrapper that Inductor generates. Stand-ins: the driver, streams, memory (tensors are
fake), ranks (collectives do nothing), and Triton's launcher, which records each call in place of loading the kernel.
Inductor neither folds constants nor measures whether to pad matrices, because it would do both on the device.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp_module
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from compile_fsdp.backend.device_graphs import ReplayedCode
from helpers.cuda.calls import record_kernel

# fmt: off
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, total_memory=80 << 30,
)
# fmt: on


class Stream:
    """A stream of the device, known by its number."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = self.stream_id = next(self._numbers)
        self.device, self.priority = torch.device("cuda", 0), priority

    def wait_stream(self, stream: Any) -> None:
        pass


# Kept by generated code that an earlier test has imported.
_CURRENT = Stream()


class _Driver:
    """Triton's driver of the device."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": H100.shared_memory_per_block_optin})

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


# Functions that read tensors of rank numbers.
_READS_RANKS = ((DeviceMesh, "__init__"), (fsdp_module, "_get_post_forward_mesh_info"))


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without the mode that makes tensors fake."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@functools.cache
def load_gpu() -> ctypes.CDLL:
    """Replace CUDA's device guard and hooks in this process, for good. Needs g++."""
    source, includes = Path(__file__).with_name("gpu.cpp"), Path(torch.__file__).with_name("include")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"compile_fsdp_gpu_{os.getuid()}_{key}.so")
    if not library.exists():
        options = ["-std=c++20", "-shared", "-fPIC", "-w", "-isystem", str(includes)]
        built = library.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{includes.with_name('lib')}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *options, str(source), "-o", str(built), *libraries], check=True)
        built.rename(library)
    return ctypes.CDLL(str(library))


@contextmanager
def h100(attention: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Iterator[None]:
    """Let torch and Triton see one H100 inside the block; torch computes attention by the given kernel."""
    import triton

    ctypes.c_int64.in_dll(load_gpu(), "attention").value = attention.value
    of_torch: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_lazy_init": lambda: None,
        "_get_device_properties": lambda _=None: H100,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: H100.name,
        "get_rng_state": lambda _=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda _=None: None,
        "current_stream": lambda _=None: _CURRENT,
        "Stream": Stream,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    # Both bypass the dispatcher, and so the mode that makes tensors fake.
    allocations: dict[str, Any] = {
        "_empty_strided_cuda": lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2], device="cuda"),
        "_reinterpret_tensor": lambda base, size, stride, offset=0: torch.as_strided(
            base, size, stride, base.storage_offset() + offset
        ),
    }
    always = property(lambda self: True, lambda self, value: None)
    with ExitStack() as stack:
        for owner, name, value in (
            *((torch.cuda, name, value) for name, value in of_torch.items()),
            *((torch._C._dynamo.guards, name, value) for name, value in allocations.items()),
            (torch._C, "_cuda_getCurrentRawStream", lambda _: _CURRENT.cuda_stream),
            (torch._C, "_cuda_setDevice", lambda _: None),
            (fake_tensor, "init_gpu_context", lambda _: None),
            (fake_tensor.FakeTensorMode, "avoid_device_init", always),
            *((owner, name, _without_modes(getattr(owner, name))) for owner, name in _READS_RANKS),
            (triton.runtime.driver, "_active", _Driver()),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (CachingAutotuner, "_make_launchers", lambda self: None),
            (CachingAutotuner, "run", record_kernel),
            (ReplayedCode, "__call__", lambda self, inputs: self.code(inputs)),  # fake tensors have no addresses
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(torch._inductor.config.patch(joint_graph_constant_folding=False, shape_padding=False))
        yield
