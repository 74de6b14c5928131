"""Session-wide set-up: ranks are shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import harness


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    yield
    harness.close_pools()
