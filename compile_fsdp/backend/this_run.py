"""Facts of a run for code that torch calls with torch's own arguments only.

[Note: One thread-local]
Dynamo calls a backend and a guard filter, and compiled autograd calls a compiled backward, without arguments of ours.
The functions are shared by all runs, so the facts of the present run are kept for its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from compile_fsdp.backend.step import BackwardObserver, FrameObserver
from compile_fsdp.torch_compat.dynamo import forget_guarded_objects, on_bytecode


@dataclass(frozen=True, slots=True)
class Run:
    """Facts of one run, each None without it. See [Note: One thread-local]."""

    hooks: Any = None  # in a backward: the object in which Dynamo keeps the hooks on its forward's intermediates
    backward: BackwardObserver | None = None  # in a backward: its observer
    observer: FrameObserver | None = None  # of the frame that is compiled


class _ThisThread(threading.local):
    run = Run()


_this_thread = _ThisThread()


def this_run() -> Run:
    return _this_thread.run


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Set the facts of this thread's run, and let its observer see the code that Dynamo generates."""
    outer, _this_thread.run = _this_thread.run, run
    try:
        with nullcontext() if run.observer is None else on_bytecode(run.observer.see_code):
            yield
    finally:
        _this_thread.run = outer


def see_guards(entries: Sequence[Any]) -> list[bool]:
    """Show all guards to the observer and keep them all, as Dynamo's option `guard_filter_fn`."""
    if (observer := this_run().observer) is not None:
        observer.see_guards(entries)
    forget_guarded_objects(entries)
    return [True] * len(entries)
