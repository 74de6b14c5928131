"""The part of torch's global state that decides whether a traced graph is valid and whether it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter

import torch
import torch.nn.attention
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from compile_fsdp.torch_compat.declarations import needs

# Context manager: ignore autocast inside, as AOTAutograd does while a compiled graph runs. (2.13.0)
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast


@needs("torch._C._len_torch_function_stack", "torch._C._get_function_stack_at")
def _function_modes() -> list[object]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _describe_mode(mode: object) -> str:
    return f"device {mode.device}" if type(mode) is DeviceContext else f"the mode {type(mode).__qualname__}"


@needs(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.utils._python_dispatch._len_torch_dispatch_stack",
)
def _modes() -> tuple[object, ...]:
    # Dispatch modes and hooks are code, so only their count or presence can be compared.
    return (
        torch.is_inference_mode_enabled(),
        *map(_describe_mode, _function_modes()),
        _python_dispatch._len_torch_dispatch_stack(),  # type: ignore[attr-defined]
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    )


@needs("torch._dynamo.eval_frame._stance.stance")
def is_forced_eager() -> bool:
    """Whether `torch.compiler.set_stance("force_eager")` is active, so no compiled code runs. (2.13.0)"""
    return eval_frame._stance.stance == "force_eager"


@needs("torch.autograd.forward_ad._current_level")
def is_in_dual_level() -> bool:
    """Whether forward-mode AD is on, whose tangents a compiled graph would lose. (2.13.0)"""
    return forward_ad._current_level >= 0


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The autocast dtype of each type of device for which autocast is enabled. (2.13.0)"""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}


# What an autocast context sets: device type, dtype, whether it is on, and whether it has a cache. Its class does not
# declare these. (2.11.0, 2.13.0)
autocast_settings = attrgetter("device", "fast_dtype", "_enabled", "_cache_enabled")


@needs("torch.nn.attention._cur_sdpa_kernel_backends")
def attention_backends(by_priority: bool = False) -> list[str]:
    """Names of the backends that scaled dot product attention may use now. (2.13.0)"""
    return [each.name for each in torch.nn.attention._cur_sdpa_kernel_backends(by_priority)]


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Let autocast cast a parameter for each op that reads it inside the block. (2.13.0)"""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class GlobalState:
    """A snapshot of the global state, to compare with later times and with other processes. (2.13.0)"""

    def __init__(self) -> None:
        # Dynamo's guard on grad mode, autocast, deterministic algorithms, thread count, matmul precision.
        self.guard = GlobalStateGuard()
        self.modes = _modes()
        # A TorchFunctionMode whose code other processes cannot compare; None if there is only a default device.
        foreign = (mode for mode in _function_modes() if type(mode) is not DeviceContext)
        self.foreign_mode = next(map(_describe_mode, foreign), None)

    def has_changed(self) -> bool:
        return not self.guard.check() or _modes() != self.modes

    def difference(self) -> str:
        if not self.guard.check():
            return str(self.guard.reason()).strip()
        return f"modes {_modes()}, and were {self.modes}"
