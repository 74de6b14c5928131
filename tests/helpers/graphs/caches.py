"""Inductor's caches of whole graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._functorch.config
import torch._inductor.config


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """No pass runs on a graph from a cache, and its report has no counts. Compiled C++ may still come from one."""
    forward, both = torch._inductor.config, torch._functorch.config
    with forward.patch(fx_graph_cache=False), both.patch(enable_autograd_cache=False):
        yield
