"""Inductor for the emulated device: its C++ kernels, enqueued on the current stream.

Registers a scheduling, a wrapper and overrides, as Inductor expects of out-of-tree devices. The kernels are the CPU's.
Only their calls differ: `launch` enqueues them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
from torch._inductor import config
from torch._inductor.codegen.common import DeviceOpOverrides, register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from helpers.device.extension import load_extension
from helpers.device.module import NAME


def register() -> None:
    """Register the device with Inductor; call once per process."""
    register_backend_for_device(NAME, CppScheduling, _Wrapper)
    register_device_op_overrides(NAME, _Overrides())
    register_interface_for_device(NAME, _Interface)
    # Inductor uses this code generator for devices it does not know by name.
    config.cuda_backend = "cpp"
    # The C++ code generator supports none of these, but the scheduler skips them only for a device named "cpu". Some
    # releases lack some of them.
    for name in ("loop_ordering_after_fusion", "loop_reindexing_after_fusion", "loop_index_inversion_in_fusion"):
        if hasattr(config, name):
            setattr(config, name, False)


def launch(name: str, kernel: Any, types: tuple[str, ...], *args: Any) -> None:
    """Enqueue a compiled kernel.

    Args:
        name: Name in the race detector's errors.
        kernel: The compiled function, which takes CPU tensors.
        types: C++ types of its arguments. A tensor passed as a pointer to const is read, any other tensor is written.
        args: Tensors on the device, and numbers.
    """
    load_extension().launch_function(name, kernel, list(args), [not each.startswith("const ") for each in types])


class _Wrapper(PythonWrapperCodegen):
    """The Python around the kernels of a graph."""

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: str | None, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        if is_subgraph:
            return PythonWrapperCodegen.create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures)
        return _Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline("from helpers.device.inductor import launch as launch_on_device")

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, triton: bool = True, **kwargs: Any
    ) -> None:
        if device is not None and device.type != NAME:
            super()._generate_kernel_call_helper(kernel_name, call_args, device=device, triton=triton, **kwargs)
            return
        types = tuple(str(each) for each in kwargs["arg_types"])
        self.writeline(f"launch_on_device({kernel_name!r}, {kernel_name}, {types!r}, {', '.join(call_args)})")


class _Interface(CpuInterface):
    """Device interface for compilers; the CPU's, because the device uses the CPU's cores."""

    Event = torch.Event
    Stream = torch.Stream

    @staticmethod
    def current_stream() -> torch.Stream:
        return torch.get_device_module(NAME).current_stream()

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.get_device_module(NAME).synchronize()

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return False


class _Overrides(DeviceOpOverrides):
    """Device-specific lines of the wrapper."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(device): return 0"

    def set_device(self, device_idx: int) -> str:
        return f"torch.{NAME}.set_device({device_idx})"

    def synchronize(self) -> str:
        return f"torch.{NAME}.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.{NAME}.device({device_idx})"

    def current_stream(self) -> str:
        return f"torch.{NAME}.current_stream()"
