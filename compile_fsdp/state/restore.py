"""`load`: read a checkpoint into a model and an optimizer, completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from compile_fsdp.errors import CheckpointError
from compile_fsdp.state.checkpoint import finish_running, quietly_alone, text_of
from compile_fsdp.state.containers import Place, decode, map_leaves
from compile_fsdp.state.folder import find_checkpoint
from compile_fsdp.state.layout import TensorSpec, empty
from compile_fsdp.state.loading import LoadPlan, plan_load
from compile_fsdp.state.ranks import on_first
from compile_fsdp.state.safe import SafePlanner, SafeReader
from compile_fsdp.state.verify import Differences


@dataclass(frozen=True, slots=True)
class Outline:
    """The contents of a checkpoint, with a `TensorSpec` in place of every tensor."""

    folder: Path
    model: Mapping[str, Any]
    """The model's state by FQN."""
    state: Mapping[str, Any]
    """The optimizer's state by FQN, encoded for DCP."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups, with tensors as values rather than `TensorSpec`s."""
    step: int | None


def load(
    model: nn.Module, optim: torch.optim.Optimizer, path: str | os.PathLike[str], *, strict: bool = True
) -> int:
    """Load the newest checkpoint in a folder or a given checkpoint, saved by any number of ranks.

    `load` compares the checkpoint with the model and the optimizer, reads it into new tensors, and only then changes
    model and optimizer. The new tensors temporarily double their memory. If `load` raises, it raises on all ranks with
    equal text, and nothing is changed. Collective: all ranks call it.

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
    finish_running(path)
    outline = on_first(lambda: read_outline(find_checkpoint(path)))
    differences = Differences(strict)
    present = get_model_state_dict(model)
    _compare_model(present, outline.model, differences)
    if outline.step is None:
        differences.missing("step")
    decoded = {fqn: decode(entries) for fqn, entries in outline.state.items()}
    what = f"the checkpoint {outline.folder}"
    plan = plan_load(model, optim, outline.groups, decoded, strict, what, differences)

    tensors: dict[str, Tensor] = {}  # tensors to read into, by their names in the checkpoint
    model_state = {
        fqn: _make_room(f"model.{fqn}", value, present[fqn], tensors)
        for fqn, value in outline.model.items()
        if fqn in present
    }
    optim_state = {fqn: _make_room_for_state(fqn, outline.state[fqn], plan, tensors) for fqn in plan.sources}
    _read(tensors, outline.folder)
    plan.apply(optim, {fqn: decode(entries) for fqn, entries in optim_state.items()})
    set_model_state_dict(model, model_state, options=StateDictOptions(strict=strict))
    return outline.step or 0


def read_outline(folder: Path) -> Outline:
    """Read a checkpoint except the tensors of model and optimizer state. Not collective.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not hold `{"model": ..., "optimizer": ...}`.
    """
    try:
        reader = SafeReader(folder)
        metadata = reader.read_metadata()
        paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data
        values: dict[str, Any] = {}
        small: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            is_option = paths[name][:2] == ("optimizer", "param_groups")
            if not isinstance(stored, TensorStorageMetadata):
                small[name] = None
            elif is_option:
                small[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                values[name] = TensorSpec(stored.size, stored.properties.dtype)
        planner = SafePlanner([Place])
        planner.set_up_planner(small, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        nested = _nest((paths[name], value) for name, value in {**values, **small}.items())
        optimizer = nested.get("optimizer", {})
    except Exception as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {type(error).__name__}: {error}") from error
    if "model" not in nested or "param_groups" not in optimizer:
        raise CheckpointError(
            f'expected a checkpoint of {{"model": ..., "optimizer": ...}} in {folder}, got one of {sorted(nested)}; '
            "write it with save()"
        )
    return Outline(
        folder, nested["model"], optimizer.get("state", {}), optimizer["param_groups"], nested.get("step")
    )


def _compare_model(present: Mapping[str, Any], saved: Mapping[str, Any], differences: Differences) -> None:
    for fqn, value in present.items():
        if fqn not in saved:
            differences.missing(fqn)
        elif isinstance(value, Tensor):
            got = saved[fqn] if isinstance(saved[fqn], TensorSpec) else None
            differences.compare(fqn, TensorSpec(value.shape, value.dtype), got)
    for fqn in saved:
        if fqn not in present:
            differences.unexpected(fqn)


def _make_room(name: str, saved: Any, present: Any, tensors: dict[str, Tensor]) -> Any:
    """Build an entry of the model's state from new tensors, and add these to `tensors` to be read."""

    def room(leaf_name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        like = isinstance(present, Tensor)
        tensors[leaf_name] = torch.empty_like(present) if like else torch.empty(leaf.shape, dtype=leaf.dtype)
        return tensors[leaf_name]

    return map_leaves(saved, room, name)


def _make_room_for_state(
    fqn: str, saved: Mapping[str, Any], plan: LoadPlan, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Build a parameter's optimizer state from new tensors, and add these to `tensors` to be read."""
    prefix = f"optimizer.state.{fqn}."
    device = plan.parameters[fqn].device

    def room(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        tensors[name] = empty(plan.target(fqn, name.removeprefix(prefix), leaf), device if leaf.shape else _CPU)
        return tensors[name]

    return {key: map_leaves(value, room, f"{prefix}{key}") for key, value in saved.items()}


_CPU = torch.device("cpu")


def _read(tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        with quietly_alone():
            load_tensors(tensors, storage_reader=SafeReader(folder))
    except CheckpointException as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {text_of(error)}") from error


def _nest(items: Iterable[tuple[tuple[str | int, ...], Any]]) -> dict[str, Any]:
    """Build nested dicts and lists from (path, leaf) pairs; an int in a path is a list index."""
    root: dict[Any, Any] = {}
    for path, value in items:
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value

    def to_lists(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        converted = {key: to_lists(each) for key, each in value.items()}
        if converted and all(isinstance(key, int) for key in converted):
            return [converted[index] for index in sorted(converted)]
        return converted

    nested: dict[str, Any] = {key: to_lists(value) for key, value in root.items()}
    return nested
