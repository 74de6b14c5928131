"""What only newer releases of torch have."""

from __future__ import annotations

import pytest
import torch


def skip_before(release: str) -> None:
    """Skip the test on a torch older than that, such as "2.12"."""
    if torch.__version__ < release:
        pytest.skip(f"torch {release} has brought it")
