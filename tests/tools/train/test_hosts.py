"""Two hosts train together, and the cable between them is pulled out."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.faults.jobs import CHECKPOINTS, prepare, read_summary, run_job
from helpers.ranks.hosts import missing_for_hosts, two_hosts
from helpers.ranks.torchrun import stop

STEPS = 60
TIMEOUT_S = 40  # covers how long one rank takes longer than the other to start and to compile
CONF = "read_timeout=200"  # seconds that torchrun bears to be without the rendezvous
SLACK_S = 30  # a busy machine
PATIENCE_S = 300


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_switched_off", [True, False], ids=["switched off and on", "connected again"])
def test_a_host_that_was_cut_off_comes_back(is_switched_off: bool, tmp_path: Path) -> None:
    if (reason := missing_for_hosts()) is not None:
        pytest.skip(reason)
    folder, logs = tmp_path / "job", [tmp_path / "first.log", tmp_path / "second.log"]
    command = prepare(folder, STEPS, [], "aot_eager", TIMEOUT_S)
    with two_hosts() as (first, second), stopping() as jobs:
        # Without it, torchrun tells a host that comes anew nowhere to meet the ranks of one that was there before.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}

        def start(index: int) -> None:
            host = (first, second)[index]
            jobs[index] = host.torchrun(folder, logs[index], first, CONF, environment, *command)

        start(0)
        start(1)
        wait_for(lambda: (folder / CHECKPOINTS / "latest").exists(), PATIENCE_S)
        second.connect(False)
        cut_s = time.monotonic()
        for rank, log in enumerate(logs):
            message = f"error (rank {rank}): expected an answer of the other ranks within {TIMEOUT_S} s"
            wait_for(lambda log=log, message=message: message in log.read_text(), TIMEOUT_S + SLACK_S)  # type: ignore[misc]
        print(f"errors after {time.monotonic() - cut_s:.1f} s, with a timeout of {TIMEOUT_S} s")
        if is_switched_off:
            jobs[1].kill()
            jobs[1].wait()
        second.connect(True)
        connected_s = time.monotonic()
        if is_switched_off:
            start(1)
        assert [jobs[index].wait(PATIENCE_S) for index in (0, 1)] == [0, 0], [log.read_text() for log in logs]
        print(f"complete {time.monotonic() - connected_s:.1f} s after the cable was back")
    assert "resumed from" in logs[0].read_text()
    assert read_summary(folder)["losses"] == run_job(tmp_path / "undisturbed", STEPS, [], "aot_eager").losses


@contextmanager
def stopping() -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Processes by number, which do not outlive the test."""
    processes: dict[int, subprocess.Popen[str]] = {}
    try:
        yield processes
    finally:
        for process in processes.values():
            if process.poll() is None:
                stop(process)


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.1)
