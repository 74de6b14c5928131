"""Session-wide set-up: ranks are shared by all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Read by torch and by us, here and in the processes that tests start. A pool of compilers for each of them costs
# more than it saves.
os.environ.update({"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
# What is decided is to be the same whatever else the machine does. Tests of measured costs ask for these.
os.environ["COMPILE_FSDP_COSTS"] = "constants"

import hypothesis
import pytest
import torch

from helpers.parity.table import ParityTable
from helpers.ranks import pools
from helpers.ranks.forked import leave_to_rest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-report", type=Path, help="write the parity table of this run to a Markdown file")
    parser.addoption("--device", default="cpu", help="where the ranks of a test compute: cpu, emulated, cuda, ...")


def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes says more about what else the machine does.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    pools.set_device_type(config.getoption("--device"))


def pytest_collection_finish() -> None:
    leave_to_rest()


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    yield
    pools.close_pools()


@pytest.fixture(scope="session")
def parity_table(request: pytest.FixtureRequest) -> Iterator[ParityTable]:
    """Gets a row from every test of the parity table; written to the file of --parity-report."""
    table = ParityTable()
    yield table
    if (path := request.config.getoption("--parity-report")) is not None:
        table.write(path, torch.__version__)
