"""The ranks of a run: those that torchrun started, or this process alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from compile_fsdp.errors import RankMissingError
from compile_fsdp.tools.train.config import DeviceChoice, TrainError
from compile_fsdp.tools.train.meeting import meet
from compile_fsdp.torch_compat.distributed import Store


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until this rank's device has done everything it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def mean(self, value: Tensor) -> float:
        """Mean of a scalar over the ranks, on every rank."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.size

    def largest(self, value: int) -> int:
        """Largest value of an integer over the ranks, on every rank."""
        result = torch.tensor(value, device=self.device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return int(result.item())


@contextmanager
def join_world(choice: DeviceChoice, timeout_s: float) -> Iterator[World]:
    """Set up the process group, the device's own and gloo for CPUs, and take it down at the end, also on errors.

    Args:
        choice: Device to train on.
        timeout_s: Seconds that a rank waits for the others, to start and in a collective.
    Raises:
        TrainError: the chosen device is missing, or has to be shared between ranks; a rank does not start in time, or
            is lost meanwhile.
    """
    device = pick_device(choice)
    with naming_lost_ranks(timeout_s):
        store, rank, size = find_store(timeout_s)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backends_of(device), store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            yield World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("dp",)))
        finally:
            dist.destroy_process_group()


def backends_of(device: torch.device) -> str:
    """The backends of a process group: gloo for the tensors of checkpoints and all on CPUs, and the device's own."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


@contextmanager
def naming_lost_ranks(timeout_s: float) -> Iterator[None]:
    """Turn errors caused by the loss of another rank into a TrainError that says so."""
    try:
        yield
    except RankMissingError as error:
        raise TrainError(f"{first_line(error)}, here --timeout-s") from error
    except RuntimeError as error:
        if (what := describe_lost_rank(error)) is None:
            raise
        raise TrainError(
            f"expected an answer of the other ranks within {timeout_s:g} s (--timeout-s), got: {what}; look for their "
            "errors, or whether this host reaches theirs; with --checkpoint, the next start goes on from the newest "
            "checkpoint"
        ) from error


def describe_lost_rank(error: RuntimeError) -> str | None:
    """The message for an error that says that a rank died or cannot be reached; None for other errors."""
    if isinstance(error, dist.DistError):
        return first_line(error)
    # gloo has no error type of its own. Its messages begin with a place in its source and end with guesses.
    found = re.search(r"gloo/\S+\] (.*?)(?:\. This is typically|$)", str(error), flags=re.MULTILINE)
    return None if found is None else found[1]


def first_line(error: Exception) -> str:
    """The first line of an error's message; Dynamo adds advice below it, and C++ a stack trace."""
    return str(error).partition("\n")[0]


def find_store(timeout_s: float) -> tuple[Store, int, int]:
    """The store at which ranks that were started together meet, the rank of this process and the number of ranks."""
    if not dist.is_torchelastic_launched():
        # A process alone needs no rendezvous, and therefore no port.
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return PrefixStore(meet(store, rank, size, timeout_s), store), rank, size


def pick_device(choice: DeviceChoice) -> torch.device:
    """Choose the device of this rank, and make it the current device if it is an accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if choice is DeviceChoice.CUDA and found is not None and found.type != "cuda":
        found = None
    if choice is DeviceChoice.CPU or (choice is DeviceChoice.AUTO and found is None):
        return torch.device("cpu")
    gpus = 0 if found is None else torch.accelerator.device_count()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found is None or local_ranks > gpus:
        raise TrainError(
            f"expected a GPU for each of the {local_ranks} ranks of this machine, got {gpus}; start fewer "
            "ranks, or train on the CPU with --device cpu"
        )
    device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device
