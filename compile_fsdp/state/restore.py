"""`load`: read a checkpoint into a model and an optimizer, completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.optim import Optimizer

from compile_fsdp.errors import CheckpointError
from compile_fsdp.state.checkpoint import checkpoint_errors, finish_running
from compile_fsdp.state.containers import decode, map_leaves
from compile_fsdp.state.expected import Differences
from compile_fsdp.state.folder import find_checkpoint
from compile_fsdp.state.layout import TensorSpec, empty
from compile_fsdp.state.loading import plan_load, unchanged_on_error
from compile_fsdp.state.ranks import on_first
from compile_fsdp.state.safe import SafePlanner, SafeReader
from compile_fsdp.torch_compat.distributed import unflatten_state_dict


def load(model: nn.Module, optim: Optimizer, path: str | os.PathLike[str], *, strict: bool = True) -> int:
    """Load the newest checkpoint in a folder or a given checkpoint, saved by any number of ranks.

    `load` compares the checkpoint with the model and the optimizer, reads it into new tensors, and only then changes
    model and optimizer. The new tensors temporarily double their memory. If `load` raises, it raises on all ranks with
    equal text, and nothing is changed, unless a module's own code raises. Collective: all ranks call it.

    Args:
        model: A model, sharded in any way or not sharded.
        optim: An optimizer over parameters of `model`, with or without state.
        path: The `path` argument of `save`, or the folder of a single checkpoint.
        strict: Whether to refuse missing and unexpected entries. If False, model and optimizer keep their values for
            missing entries, and unexpected entries are skipped.
    Returns:
        The step saved in the checkpoint; 0 if it has no step, which `strict` refuses.
    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        StateMismatchError: entries are missing, unexpected, or of wrong shape or dtype.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    on_rank_0 = finish_running(path)
    folder, outline = on_first(lambda: _read_outline(find_checkpoint(on_rank_0)))
    saved, optimizer = outline["model"], outline["optimizer"]
    differences = Differences(f"the checkpoint {folder}", strict)
    present = get_model_state_dict(model)
    _compare_model(present, saved, differences)
    if (step := outline.get("step")) is None:
        differences.add("missing", "step")
    encoded = optimizer.get("state", {})
    decoded = {fqn: decode(entries) for fqn, entries in encoded.items()}
    plan = plan_load(model, optim, optimizer["param_groups"], decoded, differences)

    tensors: dict[str, Tensor] = {}  # tensors to read into, by their names in the checkpoint

    def room_in_model(name: str, leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            like: Any = present.get(name.removeprefix("model."))
            room = torch.empty_like(like) if isinstance(like, Tensor) else torch.empty(leaf.shape, dtype=leaf.dtype)
            leaf = tensors[name] = room
        return leaf

    def room_in_state(fqn: str, entry: str, leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            device = plan.parameters[fqn].device if leaf.shape else torch.device("cpu")
            room = plan.expected[fqn].rooms.get(entry)
            room = empty(plan.target(fqn, entry, leaf), device) if room is None else room
            leaf = tensors[f"optimizer.state.{fqn}.{entry}"] = room
        return leaf

    model_state = {fqn: map_leaves(saved[fqn], room_in_model, f"model.{fqn}") for fqn in saved if fqn in present}
    optim_state = {fqn: map_leaves(encoded[fqn], partial(room_in_state, fqn)) for fqn in plan.parameters}
    with checkpoint_errors(f"cannot read the checkpoint {folder}"):
        load_tensors(tensors, storage_reader=SafeReader(folder))
    model_state = {fqn: decode(value) if isinstance(value, dict) else value for fqn, value in model_state.items()}
    with unchanged_on_error(optim):
        plan.apply(optim, {fqn: decode(entries) for fqn, entries in optim_state.items()})
        set_model_state_dict(model, model_state, options=StateDictOptions(strict=strict))
    return step or 0


def _read_outline(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint, with a `TensorSpec` in place of every tensor of model and optimizer state. Not collective."""
    try:
        reader = SafeReader(folder)
        metadata = reader.read_metadata()
        paths = metadata.planner_data
        values: dict[str, Any] = {}
        small: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                small[name] = None
            elif paths[name][:2] == ("optimizer", "param_groups"):
                small[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                values[name] = TensorSpec(stored.size, stored.properties.dtype)
        planner = SafePlanner(flatten_state_dict=False)
        planner.set_up_planner(small, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        nested: dict[str, Any] = unflatten_state_dict({**values, **small}, paths)
    except Exception as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {type(error).__name__}: {error}") from error
    state, optimizer = nested.get("model"), nested.get("optimizer")
    if not (isinstance(state, Mapping) and isinstance(optimizer, Mapping) and "param_groups" in optimizer):
        raise CheckpointError(
            f'expected a checkpoint of {{"model": ..., "optimizer": ...}} in {folder}, got one of {sorted(nested)}; '
            "write it with save(), whose entries are dicts"
        )
    return folder, nested


def _compare_model(present: Mapping[str, Any], saved: Mapping[str, Any], differences: Differences) -> None:
    for fqn, value in present.items():
        if fqn not in saved:
            differences.add("missing", fqn)
        elif isinstance(value, Tensor):
            got = saved[fqn] if isinstance(saved[fqn], TensorSpec) else None
            differences.compare(fqn, TensorSpec(value.shape, value.dtype), got)
    differences.add_foreign(saved.keys() - present.keys())
