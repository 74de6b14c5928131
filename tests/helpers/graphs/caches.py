"""Switch for Inductor's and AOTAutograd's caches of whole graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._functorch.config
import torch._inductor.config


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Disable graph caches, because passes skip cached graphs. Compiled C++ may still come from a cache."""
    forward, both = torch._inductor.config, torch._functorch.config
    with forward.patch(fx_graph_cache=False), both.patch(enable_autograd_cache=False):
        yield
