"""Copy tensors to host memory and back while the device computes.

[Note: One stream for both ways]
All these copies run on one stream of the device. So a fetch begins behind the offload that it reads, and nothing else
waits for that offload. A compiled graph must not overwrite memory before it is copied. So `offload` takes the tensors
offloaded before it: they stay allocated until this call, which makes the computing stream wait for the copies so far.
The last offload of a graph also waits for its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from compile_fsdp.torch_compat.distributed import register_work

_LIBRARY = torch.library.Library("compile_fsdp", "FRAGMENT")
_LIBRARY.define("offload(Tensor input, Tensor[] sent, bool is_last) -> Tensor")
_LIBRARY.define("fetch(Tensor input, Device device) -> Tensor")

offload = torch.ops.compile_fsdp.offload.default
fetch = torch.ops.compile_fsdp.fetch.default

_HOST = torch.device("cpu")


@cache
def _transfer_stream(device: torch.device) -> Any:
    # See [Note: One stream for both ways].
    return torch.get_device_module(device).Stream(device=device)


def _on_host(input: Tensor, sent: Sequence[Tensor], is_last: bool) -> Tensor:
    return torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=_HOST)


@torch.library.impl(_LIBRARY, "offload", "CompositeExplicitAutograd")
def _offload(input: Tensor, sent: Sequence[Tensor], is_last: bool) -> Tensor:
    """Return a copy with equal strides in pinned host memory. Only `fetch` may read it, because it may be in flight."""
    device = input.device
    if device.type == "cpu":
        return _on_host(input, sent, is_last).copy_(input)
    output = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=_HOST, pin_memory=True)
    module, transfers = torch.get_device_module(device), _transfer_stream(device)
    computing = module.current_stream(device)
    if sent:
        computing.wait_stream(transfers)
    transfers.wait_stream(computing)
    with module.stream(transfers):
        output.copy_(input, non_blocking=True)
    if is_last:
        computing.wait_stream(transfers)
    return output


def _on_device(input: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=device)


@torch.library.impl(_LIBRARY, "fetch", "CompositeExplicitAutograd")
def _fetch(input: Tensor, device: torch.device) -> Tensor:
    """Return an offloaded tensor on the device, ready after `wait_tensor`."""
    output = _on_device(input, device)
    if device.type == "cpu":
        return output.copy_(input)
    module, transfers = torch.get_device_module(device), _transfer_stream(device)
    transfers.wait_stream(module.current_stream(device))
    with module.stream(transfers):
        output.copy_(input, non_blocking=True)
        arrived = transfers.record_event()
    register_work(output, _Arrival(device, arrived))
    return output


class _Arrival(Work):
    """Work that makes the device's computing stream wait for the event behind a copy."""

    def __init__(self, device: torch.device, event: Any) -> None:
        super().__init__()
        self._device = device
        self._event = event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
        return True


torch.library.register_fake("compile_fsdp::offload", _on_host, lib=_LIBRARY)
torch.library.register_fake("compile_fsdp::fetch", _on_device, lib=_LIBRARY)
