"""The devices that ranks can compute on: the CPU, the emulated one, and every accelerator that torch knows here."""

from __future__ import annotations


def missing_for(device: str, world_size: int) -> str | None:
    """Why there can be no such world; None where there can. Each rank gets an accelerator of its own."""
    if device == "cpu":
        return None
    if device == "emulated":
        from helpers.device.build import build

        build()  # here, and not in ranks that have to be done within a time
        return None
    import torch

    count = torch.get_device_module(device).device_count()
    return None if count >= world_size else f"needs {world_size} devices of the type {device}, found {count}"


def prepare(device: str, rank: int) -> None:
    """Make this process one that computes on the device, for good."""
    import torch

    if device == "cpu":
        return
    if device == "emulated":
        from helpers.device.install import install

        install()
    torch.get_device_module(device).set_device(rank)
    torch.set_default_device(device)
