"""Session-wide set-up: ranks are shared by all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Read here and in the processes that tests start. A compile worker pool in each process costs more than it saves.
os.environ.update({"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
os.environ.pop("COMPILE_FSDP_COSTS", None)
# An op of ours whose result aliases an argument then fails.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

import hypothesis
import pytest
import torch
import torch.distributed as dist

from helpers.parity.table import ParityTable
from helpers.ranks import pools
from helpers.ranks.forked import leave_to_rest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-report", type=Path, help="page whose parity table this run updates")
    parser.addoption("--device", default="cpu", help="where the ranks of a test compute: cpu, emulated, cuda, ...")


def pytest_configure(config: pytest.Config) -> None:
    # No deadline, because an example's time depends on the machine's load.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    pools.set_device_type(config.getoption("--device"))


def pytest_collection_finish() -> None:
    leave_to_rest()


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    yield
    pools.close_pools()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A world whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def parity_table(request: pytest.FixtureRequest) -> Iterator[ParityTable]:
    """Table filled by the parity tests, written to --parity-report."""
    table = ParityTable()
    yield table
    if (path := request.config.getoption("--parity-report")) is not None:
        table.write(path, torch.__version__)
