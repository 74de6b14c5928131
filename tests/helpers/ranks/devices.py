"""Devices for ranks: the CPU, the emulated device, and this machine's accelerators."""

from __future__ import annotations


def missing_for(device: str, world_size: int) -> str | None:
    """Reason why a world with an accelerator per rank cannot run, or None."""
    if device == "cpu":
        return None
    if device == "emulated":
        from helpers.device.extension import build

        build()  # here, because ranks have a timeout
        return None
    import torch

    count = torch.get_device_module(device).device_count()
    return None if count >= world_size else f"needs {world_size} devices of the type {device}, found {count}"


def prepare(device: str, rank: int) -> None:
    """Make the device this process's default, permanently."""
    import torch

    if device == "cpu":
        return
    if device == "emulated":
        from helpers.device.install import install

        install()
    torch.get_device_module(device).set_device(rank)
    torch.set_default_device(device)
