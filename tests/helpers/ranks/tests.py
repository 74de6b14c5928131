"""Tests whose body runs on ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from helpers.ranks.pools import DEFAULT_TIMEOUT_S, run_ranks
from helpers.releases.skip import skip_before


def on_ranks(
    world_size: int, device: str | None = None, since: str = "2.11", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body every rank runs, in a pool of ranks; see `run_ranks`.

    The test's first parameter is the rank. The others are pytest's, and their values are pickled.

    Args:
        device: The ranks' device; by default pytest's --device.
        since: First torch release with which the test runs.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        _, *others = signature.parameters.values()

        @functools.wraps(function)
        def test(*by_rank: Any, **by_pytest: Any) -> None:
            if by_rank:
                function(*by_rank)
                return
            skip_before(since)
            values = [by_pytest[each.name] for each in others]
            run_ranks(world_size, function, *values, timeout_s=timeout_s, device=device)

        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return test

    return decorate
