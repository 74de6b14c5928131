from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    """An op namespace that nothing else uses, so that a test cannot break the real ops."""
    return f"compile_fsdp_test_{next(_numbers)}"


@pytest.fixture
def library(namespace: str) -> Iterator[torch.library.Library]:
    """Owner of the ops and kernels that a test defines in its namespace."""
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    yield library
    library._destroy()  # type: ignore[no-untyped-call]
