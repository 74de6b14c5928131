"""`save` and `async_save`: write `{"model": ..., "optimizer": ..., "step": ...}` with torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from compile_fsdp.errors import CheckpointError
from compile_fsdp.state.containers import encode, encode_extra
from compile_fsdp.state.folder import begin, complete
from compile_fsdp.state.optim import optim_state_dict
from compile_fsdp.state.ranks import broadcast, gather, is_first, on_first

# The last background save into each folder; the next save waits for it, so that `latest` never names the older one.
_running: dict[Path, PendingSave] = {}


class PendingSave:
    """A save that runs in the background."""

    def __init__(self, written: Future[Any], part: Path, files: Mapping[str, str], group: Any) -> None:
        self._completed: Future[Path] = Future()
        self._part = part
        self._files = files
        self._group = group
        self._is_first = is_first()
        self._error: BaseException | None = None
        written.add_done_callback(self._complete)

    def _complete(self, written: Future[Any]) -> None:
        # Runs on the background thread. When it runs on rank 0, all ranks have written their data.
        try:
            written.result()
            if self._is_first:
                complete(self._part, self._files)
            self._completed.set_result(self._part.with_suffix(""))
        except BaseException as error:
            self._completed.set_exception(error)

    def done(self) -> bool:
        """Whether this rank's part is written. Not collective."""
        return self._completed.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder. Collective: all ranks call it.

        Raises:
            CheckpointError: the save failed; the previous checkpoint is unchanged.
        """
        error = self._completed.exception()
        if _running.get(self._part.parent) is self:
            del _running[self._part.parent]
        failure = None if error is None else _text_of(error)
        if self._group is not None:
            try:
                failure = next((text for text in gather(failure, self._group) if text), None)
            except RuntimeError as lost:
                failure = failure or _text_of(lost)
            dist.destroy_process_group(self._group)
            self._group = None
        if failure is not None:
            self._error = CheckpointError(f"cannot write {self._part}: {failure}")
        if self._error is not None:
            raise self._error from error
        return self._completed.result()


def save(
    model: nn.Module,
    optim: Optimizer,
    path: str | os.PathLike[str],
    step: int,
    *,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Save model and optimizer as the newest checkpoint in a folder. Collective: all ranks call it.

    Each rank writes its shards. An interrupted save changes no earlier checkpoint; the next save removes its files.

    Args:
        model: The model, sharded or not; its whole `state_dict()` is saved.
        optim: An optimizer over parameters of `model`.
        path: Folder for the run's checkpoints, on a file system that all ranks share; created if missing.
        step: Number of completed optimizer steps. It names the checkpoint, and `load` returns it.
        files: Texts to store in the checkpoint, by file name. Only rank 0 writes them.
    Returns:
        The folder of this checkpoint, `path/step-...`.
    Raises:
        CheckpointError: files cannot be written; raised on all ranks with equal text.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    state, part = _prepare(model, optim, path, step)
    write_tensors(state, part)
    return on_first(lambda: complete(part, files or {}))


def async_save(
    model: nn.Module,
    optim: Optimizer,
    path: str | os.PathLike[str],
    step: int,
    *,
    files: Mapping[str, str] | None = None,
) -> PendingSave:
    """Run `save` in the background; return when all tensors are copied to the CPU and training can continue.

    Returns:
        A handle. All ranks must call its `wait()` before they exit; `wait()` raises if the save failed. A later save
        into the folder waits for this save.
    """
    state, part = _prepare(model, optim, path, step)
    # In the default group, the save's collectives would mix with training's in an order that differs between ranks.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    written = async_save_tensors(state, checkpoint_id=part, process_group=group)
    assert isinstance(written, Future)
    pending = PendingSave(written, part, dict(files or {}), group)
    _running[part.parent] = pending
    return pending


def write_tensors(state: dict[str, Any], folder: Path) -> None:
    with checkpoint_errors(f"cannot write {folder}"):
        save_tensors(state, checkpoint_id=folder)


def _prepare(
    model: nn.Module, optim: Optimizer, path: str | os.PathLike[str], step: int
) -> tuple[dict[str, Any], Path]:
    """The state to save, and the folder for its files."""
    optimizer = optim_state_dict(model, optim)
    optimizer["state"] = {fqn: encode(entries) for fqn, entries in optimizer["state"].items()}
    optimizer["param_groups"] = _groups_of_all(optimizer["param_groups"])
    saved = {fqn: encode_extra(value) for fqn, value in get_model_state_dict(model).items()}
    state = {"model": saved, "optimizer": optimizer, "step": step}
    folder = finish_running(path)
    return state, on_first(lambda: begin(folder, step))


def _groups_of_all(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups of all ranks, which have different parameters in stages of a pipeline. Collective."""
    names = [group["params"] for group in groups]
    if len(set(gather(hashlib.sha256(repr(names).encode()).hexdigest()))) == 1:
        return groups
    every: dict[tuple[str, ...], dict[str, Any]] = {}
    for group in itertools.chain.from_iterable(gather(groups)):
        every.setdefault(tuple(group["params"]), group)
    return [*every.values()]


def finish_running(path: str | os.PathLike[str]) -> Path:
    """Wait for a background save into the folder, and return its absolute path on rank 0. Collective."""
    folder = broadcast(Path(path).absolute())
    if (running := _running.get(folder)) is not None:
        running.wait()
    return folder


@contextlib.contextmanager
def checkpoint_errors(failure: str) -> Iterator[None]:
    """Raise torch.distributed.checkpoint's errors as `CheckpointError`; no warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            raise CheckpointError(f"{failure}: {_text_of(error)}") from error


def _text_of(error: BaseException) -> str:
    """The message of an error, or for a `CheckpointException` the messages of all failed ranks."""
    if isinstance(error, CheckpointException):
        causes = {rank: failure for rank, (failure, _) in error.failures.items()}
        return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
    return f"{type(error).__name__}: {error}"
