"""Training jobs under torchrun whose ranks are killed, and their outcomes."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from helpers.ranks.forked import TESTS
from helpers.ranks.torchrun import torchrun

PHASES = ("forward", "backward", "optimizer", "save", "compile")
SAVE_EVERY = 2
STEPS_BETWEEN_KILLS = 2 * SAVE_EVERY  # at most: a rank dies in its fourth step at the latest
PATIENCE_S = 60.0
TIMEOUT_S = 300.0  # of a rank's collectives

PLAN, RECORD, CHECKPOINTS = "plan.json", "record.jsonl", "checkpoint"  # in the folder of a job

_JOB = "COMPILE_FSDP_TEST_JOB"  # environment variable that marks the processes of a job


@dataclass(frozen=True, slots=True)
class Kill:
    """The moment at which a rank is killed."""

    phase: str  # one of `PHASES`
    rank: int
    occurrence: int  # which run of the phase since the rank's start, from 1
    delay_s: float  # seconds from the beginning of the phase; if the phase ends earlier, the rank dies at its end


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a job."""

    losses: list[float]  # of every step, from the final report
    first_step: int  # number of steps done before the last start
    record: list[dict[str, Any]]  # entries that the ranks wrote
    output: str  # of torchrun and the ranks
    seconds: float


def run_job(folder: Path, steps: int, kills: Sequence[Kill], inner_backend: str) -> Outcome:
    """Train on two ranks in a new folder, with a restart per kill.

    Raises:
        AssertionError: if torchrun fails, or processes of the job remain.
    """
    command = prepare(folder, steps, kills, inner_backend, TIMEOUT_S)
    job = uuid.uuid4().hex
    start = time.monotonic()
    # A new cache folder contains only entries that this job's killed ranks left.
    environment = {_JOB: job, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or restarted ranks read keys of the killed ranks
    output = torchrun(folder, *command, max_restarts=len(kills), environment=environment)
    seconds = time.monotonic() - start
    assert not _wait_for_the_end_of(job)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    entries = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    return Outcome(summary["losses"], summary["first_step"], entries, output, seconds)


def prepare(folder: Path, steps: int, kills: Sequence[Kill], inner_backend: str, timeout_s: float) -> list[object]:
    """Create a job's folder; return the command for every rank."""
    folder.mkdir()
    (folder / PLAN).write_text(json.dumps([asdict(kill) for kill in kills]))
    (folder / RECORD).touch()
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    command = ["--data", "text.txt", "--steps", steps, "--inner-backend", inner_backend]
    files = ["--checkpoint", CHECKPOINTS, "--save-every", SAVE_EVERY, "--output", "out", "--timeout-s", timeout_s]
    return [Path(__file__).with_name("sabotaged_train.py"), PLAN, RECORD, *command, *files]


def draw_kills(rng: random.Random, phases: Sequence[str], undisturbed: Outcome) -> list[Kill]:
    """Draw a kill per phase, in random order, within the phase's undisturbed duration."""
    kills = []
    for phase in rng.sample(phases, len(phases)):
        seconds = median(entry["seconds"] for entry in undisturbed.record if entry["phase"] == phase)
        most = {"compile": 1, "save": 2}.get(phase, 3)
        kills.append(Kill(phase, rng.randrange(2), rng.randint(1, most), rng.uniform(0.0, seconds)))
    return kills


def _wait_for_the_end_of(job: str) -> list[str]:
    """Wait for the job's processes to end; return the remaining command lines."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := _processes_of(job)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def _processes_of(job: str) -> list[str]:
    marker = f"{_JOB}={job}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # the process has ended, or belongs to a different user
            continue
    return found
