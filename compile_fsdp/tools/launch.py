"""Start ranks: processes of this host, or this process as one rank of a fake world.

Each process gets the environment variables that torchrun sets, so code on a rank joins its process group in the same
way under torchrun and here. As under torchrun, the parent holds the key-value store; no port is chosen in advance.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from compile_fsdp.errors import CommandError, ScriptError
from compile_fsdp.torch_compat.distributed import init_fake_process_group
from compile_fsdp.torch_compat.files import checkpoints_of_one_rank, new_groups_are_fake

_GRACE_S = 5.0  # after an error on one rank, the time until ranks that may wait for it are killed
_EXIT_S = 30.0  # time in which an idle rank ends by itself
_STACK_CHARS = 4000  # of an unfinished rank, from the end


class RankError(RuntimeError):
    """Raised if ranks raise; the message has the traceback of each such rank."""


class RankLost(RuntimeError):
    """Raised if a rank ends or times out; the message has the stacks of all unfinished ranks."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # of the ended rank, negative for a signal; None after a timeout


class Ranks:
    """One process of this host for each rank; they run one function after the other.

    Use as a context manager, or call `close()` or `kill()`. The processes also end with this process. `context` is a
    multiprocessing context with the start method "spawn", which is the default, or "forkserver".
    """

    def __init__(self, size: int, context: Any = None) -> None:
        context = context or multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="compile_fsdp_ranks_")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        atexit.register(self.kill)  # multiprocessing waits at exit for processes that still run
        for rank in range(size):
            ours, theirs = context.Pipe()
            variables = _torchrun_variables(rank, size, self._store.port)
            process = context.Process(target=_serve, args=(rank, theirs, variables, str(self._stack_file(rank))))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self.kill()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return the results, by rank.

        Args:
            function: Pickled by its name, so a module's function; a rank ends if it raises `SystemExit`.
            timeout_s: Seconds until the ranks are killed; None waits forever.
        Raises:
            RankError: if a rank raises and every rank answers; the ranks stay usable.
            RankLost: if a rank ends or does not return in time; all ranks are killed.
        """
        self.begin(function, *args)
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting := {c: i for i, c in enumerate(self._connections) if i not in results and i not in errors}:
            left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), left_s)
            if not ready:
                why = f"not finished after {timeout_s:g} s" if not errors and timeout_s else ""
                self._give_up([*_described(errors), why], list(waiting.values()))
            for connection, rank in waiting.items():
                if connection not in ready:
                    continue
                try:
                    is_error, value = connection.recv()
                except EOFError:
                    self.processes[rank].join(_GRACE_S)
                    code = self.processes[rank].exitcode
                    why = f"rank {rank} ended with exit code {code}\n{self._stack(rank)}"
                    self._give_up([*_described(errors), why], [i for i in waiting.values() if i != rank], code)
                (errors if is_error else results)[rank] = value
            if errors:  # the other ranks may wait for the failed rank forever
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if errors:
            raise RankError("\n".join(_described(errors)))
        return [results[rank] for rank in range(len(self.processes))]

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(rank, *args)` on every rank and return at once."""
        for connection in self._connections:
            connection.send((function, args))

    def _give_up(self, reasons: list[str], waiting: list[int], code: int | None = None) -> None:
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {rank} was at:\n{self._stack(rank)}" for rank in waiting]
        self.kill()
        raise RankLost("\n".join(filter(None, [*reasons, *stacks])), code)

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name, f"stack_{rank}")

    def _stack(self, rank: int) -> str:
        file = self._stack_file(rank)
        return file.read_text()[-_STACK_CHARS:] if file.exists() else ""

    def close(self) -> None:
        """Let idle ranks exit, and kill those that do not."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _EXIT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        atexit.unregister(self.kill)
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


def run(size: int, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
    """Call `function(rank, *args)` on new processes, one for each rank. See `Ranks.run`."""
    with Ranks(size) as ranks:
        return ranks.run(function, *args, timeout_s=timeout_s)


def _described(errors: dict[int, str]) -> list[str]:
    return [f"rank {rank}:\n{errors[rank]}" for rank in sorted(errors)]


def _torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    elastic = {"TORCHELASTIC_RUN_ID": "compile_fsdp", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**address, **numbers, **elastic, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _serve(rank: int, connection: Connection, variables: dict[str, str], stack_file: str) -> None:
    os.environ.update(variables)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, KeyboardInterrupt):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks)  # writes the stack of a segmentation fault
        while True:
            function, args = connection.recv()
            try:
                reply = False, function(rank, *args)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # pytest's failures derive from BaseException
                reply = True, traceback.format_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(reply)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # also if the main thread waits in a collective


def join(device: torch.device, *, meeting: str = "first", timeout_s: float | None = None) -> None:
    """Make the default process group of all ranks, or of this process alone if it is no rank. Collective.

    Args:
        meeting: A name that is new for each group that the ranks make in turn.
        timeout_s: Seconds that a collective waits for a rank; None uses torch's default.
    """
    store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://"))
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    own = PrefixStore(meeting, store)
    backends = "gloo"  # for CPU tensors, which checkpoints need
    if device.type != "cpu":
        backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backends, store=own, rank=rank, world_size=size, timeout=timeout)


def use_device() -> torch.device:
    """Make this rank's accelerator the current device and return it; the CPU if there is no accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    count, ranks = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > count:
        raise CommandError(f"expected a device for each of the {ranks} ranks of this host, got {count}; start fewer")
    device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of the first machine whose collectives do nothing, for graphs instead of values.

    The block has a fake process group and torchrun's variables, except MASTER_PORT, so that no second process group
    waits for missing ranks. A checkpoint that is saved in it has only the shards of this rank.
    """
    if size < 1:
        raise ScriptError(f"expected --world to be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ScriptError(f"expected --rank to be at least 0 and less than {size}, got {rank}")
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(rank + 1)}
    ours["MASTER_ADDR"] = "127.0.0.1"  # libraries read it
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        init_fake_process_group(size, rank)
        try:
            with checkpoints_of_one_rank(), new_groups_are_fake():
                yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    finally:
        for name in ours:
            os.environ.pop(name, None)
        os.environ.update(before)
