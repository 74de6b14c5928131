"""Number of random examples per test: 120 by default, 10,000 in the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

MANY = pytest.mark.parametrize(
    "examples", [120, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])]
)


def fuzz(check: Callable[..., None], examples: int, *strategies: SearchStrategy[Any]) -> None:
    """Call `check` with arguments drawn from the strategies, for this number of examples."""
    settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])(given(*strategies)(check))()
