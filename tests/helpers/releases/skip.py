"""Skips for features of newer torch releases."""

from __future__ import annotations

import pytest
import torch


def skip_before(release: str) -> None:
    """Skip the test if torch is older than `release`, such as "2.12"."""
    if torch.__version__ < release:
        pytest.skip(f"torch {release} has brought it")
