"""Device graphs, such as CUDA graphs, and who holds their memory."""

from __future__ import annotations

import torch

from compile_fsdp.torch_compat.declarations import needs


def has_device_graphs(device: torch.device) -> bool:
    """Whether torch captures graphs on this device as on CUDA."""
    return hasattr(torch.get_device_module(device), "CUDAGraph")


@needs("torch._C._storage_Use_Count")
def count_holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors and other objects that hold a storage. (2.13.0)"""
    return int(torch._C._storage_Use_Count(storage._cdata))
