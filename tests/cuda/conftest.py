"""Set-up of the suite behind `make test-cuda`: skips without torch for CUDA, and replaces CUDA's driver for good."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        pytest.skip("needs torch for CUDA, and Triton")
    if torch.cuda.is_available():
        pytest.skip("stands in for a GPU, and this machine has one")
