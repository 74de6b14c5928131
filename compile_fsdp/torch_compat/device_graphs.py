"""Device graphs, such as CUDA graphs, and tensors over memory that a graph owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from compile_fsdp.torch_compat.declarations import needs


def has_device_graphs(device: torch.device) -> bool:
    """Whether torch captures graphs on this device as on CUDA."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "CUDAGraph")


@needs("torch._C._construct_storage_from_data_pointer")
def alias_memory(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Return a tensor over the same memory with a storage of its own, which does not keep the memory. (2.13.0)

    Also returns a function that tells whether nothing holds the new storage any more.
    """
    memory = tensor.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return alias, StorageWeakRef(storage).expired
