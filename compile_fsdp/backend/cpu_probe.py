"""Let Inductor probe a CPU while Dynamo traces.

[Note: A probe beside the trace]
Before its first kernel for a CPU, Inductor builds and loads small libraries to see which vector instructions work: six
of them, one after another, in 6.9 s (torch 2.13.0, 2026-11-28). The results stay in its cache folder. The work is done
in subprocesses, so a thread that starts them leaves the interpreter to the trace. A compilation waits for its end: two
probes at once change the flags of one shared object, after which the ranks build their kernels with different flags.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from compile_fsdp.torch_compat.inductor import inductor_compilers, pick_vec_isa

_NAME = "compile_fsdp CPU probe"


def start_cpu_probe(device: torch.device) -> None:
    """Begin Inductor's probe in a thread, for a model on a CPU. See [Note: A probe beside the trace]."""
    if device.type != "cpu":
        return
    inductor_compilers()  # imports Inductor here, because two threads must not import its files at once
    threading.Thread(target=_probe, args=(pick_vec_isa.value,), name=_NAME, daemon=True).start()


def await_cpu_probe() -> None:
    """Wait for the end of a probe before a compilation, which would begin another one beside it."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join()


def _probe(pick: Callable[[], object]) -> None:
    with suppress(Exception):  # the compiler meets the same error, and reports it
        pick()
