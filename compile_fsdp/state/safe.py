"""Read checkpoints of torch.distributed.checkpoint without running code from their pickles.

torch's own reader and planner unpickle the file `.metadata` and every value that is not a tensor without checks, and a
pickle can call any function. `torch.load(weights_only=True)` accepts only numbers, strings, containers and tensors.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from compile_fsdp.state.containers import Place

# Modules whose classes only hold data.
_DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
# Classes and functions elsewhere that only make a value, such as a layout or a path.
_PLAIN = {
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("torch.serialization", "_get_layout"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}


class SafeReader(FileSystemReader):
    """Reads checkpoints from a folder, and unpickles only descriptions of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"expected Metadata, got {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _enum_member(cls: Any, name: str) -> enum.Enum:
    """Replace `getattr`, by which some Pythons (3.11.2) pickle a member of an enum."""
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and name in cls.__members__:
        return cls[name]
    raise pickle.UnpicklingError(f"expected only descriptions of tensors in .metadata, got builtins.getattr of {name}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        found = None
        if module == "torch" or module in _DESCRIPTIONS or (module, name) in _PLAIN:
            found = super().find_class(module, name)
        is_description = module in _DESCRIPTIONS and isinstance(found, type) and found.__module__ == module
        if is_description or isinstance(found, torch.dtype) or (module, name) in _PLAIN:
            return found
        raise pickle.UnpicklingError(f"expected only descriptions of tensors in .metadata, got {module}.{name}")


class SafePlanner(DefaultLoadPlanner):
    """Loads values that are not tensors into a flat state dict, with `torch.load(weights_only=True)`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals([Place]):
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
