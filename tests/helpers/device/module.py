"""`torch.emulated`: the functions that torch and users expect of a device module.

Streams, events and other generic parts are torch's own; they reach the extension through its device guard.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

NAME = "emulated"


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if not kwargs:
            kwargs["device"] = NAME if device is None else device
        return super().__new__(cls, priority=priority, **kwargs)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Create a plain `torch.Event`, because `elapsed_time` accepts no other class."""
    return torch.Event(device=NAME, enable_timing=enable_timing)


class device:
    """Context manager that does nothing, because there is only one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def make_module(extension: ModuleType) -> ModuleType:
    """Create the module to register as `torch.emulated`."""
    module = types.ModuleType(f"torch.{NAME}")
    generator = extension.default_generator()

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @contextlib.contextmanager
    def graph(
        cuda_graph: Any, pool: Any = None, stream: torch.Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        torch.accelerator.synchronize()
        with module.stream(Stream() if stream is None else stream):
            cuda_graph.begin()
            try:
                yield
            finally:
                cuda_graph.end()

    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        generator.set_state(state)

    def get_device_properties(device: Any = None) -> Any:
        return types.SimpleNamespace(name=NAME, multi_processor_count=1, total_memory=2**36, major=0, minor=0)

    contents = {
        "CUDAGraph": extension.Graph,
        "Event": Event,
        "Stream": Stream,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": current_stream,
        "default_generators": (generator,),
        "device": device,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_properties": get_device_properties,
        "get_rng_state": get_rng_state,
        "graph": graph,
        "initial_seed": generator.initial_seed,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_initialized": lambda: True,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": lambda device=None: int(extension.statistics()["peak_bytes"]),
        "memory_allocated": lambda device=None: int(extension.statistics()["allocated_bytes"]),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(),
        "set_device": lambda device: None,
        "set_rng_state": set_rng_state,
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module
