"""Compile once in the fork server, so that no rank repeats the set-up.

The first compile of a process imports a hundred modules. With Inductor it imports two hundred more, builds the patterns
to match, hashes torch's files, and probes the C++ compiler's vector instructions with one process per kind.
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch._inductor.config
import tqdm

import compile_fsdp.backend.compile
import compile_fsdp.replay.model  # noqa: F401  imported when a model is compiled with it
from helpers.ranks.forked import restore_path


def _compile() -> None:
    """Compile a forward only, because autograd's threads forbid a fork after a backward."""

    @torch.compile(backend="inductor")
    def compute(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x @ x, (4,)).sum()

    # A graph from a cache would run none of Inductor's passes.
    with torch._inductor.config.patch(fx_graph_cache=False):
        compute(torch.ones(4, 4))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _prepare() -> None:
    # A progress bar starts a monitor thread, and threads do not survive a fork.
    tqdm.tqdm.monitor_interval = 0
    # Dynamo reads the GPU generator's state, and a process that has used a GPU cannot be forked.
    if torch.accelerator.current_accelerator() is None:
        with contextlib.suppress(RuntimeError):  # there may be no C++ compiler
            _compile()


_environment = dict(os.environ)  # Inductor adds variables
_prepare()
os.environ.clear()
os.environ.update(_environment)
restore_path()
