"""What the first compile of a process prepares, prepared once for all ranks: the server that they fork from imports it.

That is a hundred modules for any compiler, and for Inductor two hundred more, the patterns that it matches, a hash of
torch's files, and what vectors this machine's C++ compiler knows: it asks with a new process for each kind.
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
    """Without a backward, after which autograd's threads forbid a fork."""

    @torch.compile(backend="inductor")
    def compute(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x @ x, (4,)).sum()

    # Or the graph may come from a cache, and no pass of Inductor is prepared.
    with torch._inductor.config.patch(fx_graph_cache=False):
        compute(torch.ones(4, 4))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _prepare() -> None:
    # A bar of progress starts a thread, and no thread outlives a fork.
    tqdm.tqdm.monitor_interval = 0
    # Dynamo asks a GPU for the state of its generator, and what has asked a GPU for anything cannot be forked.
    if torch.accelerator.current_accelerator() is None:
        with contextlib.suppress(RuntimeError):  # there may be no C++ compiler
            _compile()


_environment = dict(os.environ)  # Inductor adds to it
_prepare()
os.environ.clear()
os.environ.update(_environment)
restore_path()
