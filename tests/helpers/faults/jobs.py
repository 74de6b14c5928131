"""Jobs under torchrun of which ranks are killed, and what becomes of them."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from helpers.ranks.torchrun import torchrun

PHASES = ("forward", "backward", "optimizer", "save", "compile")
SAVE_EVERY = 2
STEPS_BETWEEN_KILLS = 2 * SAVE_EVERY  # at most: a rank dies in its fourth step at the latest
PATIENCE_S = 60.0
TIMEOUT_S = 300.0  # of a rank that waits for another one

PLAN, RECORD, CHECKPOINTS = "plan.json", "record.jsonl", "checkpoint"  # in the folder of a job

_JOB = "COMPILE_FSDP_TEST_JOB"  # an environment variable by which the processes of a job are found


@dataclass(frozen=True, slots=True)
class Kill:
    """When a rank dies.

    Attributes:
        phase: One of `PHASES`.
        rank: Who dies.
        occurrence: How many times the rank gets to this phase since its start, this one included.
        delay_s: Seconds from the beginning of the phase; where it is over before, the rank dies at its end.
    """

    phase: str
    rank: int
    occurrence: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job left.

    Attributes:
        losses: Of every step, by the final report.
        first_step: Steps done before the last start.
        record: What the ranks wrote down, in order.
        output: What torchrun and the ranks printed.
        seconds: From start to end.
    """

    losses: list[float]
    first_step: int
    record: list[dict[str, Any]]
    output: str
    seconds: float


def run_job(folder: Path, steps: int, kills: Sequence[Kill], inner_backend: str) -> Outcome:
    """Train on two ranks in a new folder, with as many restarts as there are kills.

    Raises:
        AssertionError: torchrun ends with an error, or processes of the job are left.
    """
    command = prepare(folder, steps, kills, inner_backend, TIMEOUT_S)
    job = uuid.uuid4().hex
    start = time.monotonic()
    # Inductor's caches are as the killed ranks left them, and hold nothing from before.
    environment = {_JOB: job, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    output = torchrun(folder, *command, max_restarts=len(kills), environment=environment)
    seconds = time.monotonic() - start
    assert not _wait_for_the_end_of(job)
    summary = read_summary(folder)
    entries = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    return Outcome(summary["losses"], summary["first_step"], entries, output, seconds)


def prepare(folder: Path, steps: int, kills: Sequence[Kill], inner_backend: str, timeout_s: float) -> list[object]:
    """Make the folder of a job; what every rank is to run there."""
    folder.mkdir()
    (folder / PLAN).write_text(json.dumps([asdict(kill) for kill in kills]))
    (folder / RECORD).touch()
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    command = ["train", "--device", "cpu", "--data", "text.txt", "--steps", steps, "--inner-backend", inner_backend]
    files = ["--checkpoint", CHECKPOINTS, "--save-every", SAVE_EVERY, "--output", "out", "--timeout-s", timeout_s]
    return [Path(__file__).with_name("sabotaged_train.py"), PLAN, RECORD, *command, *files]


def read_summary(folder: Path) -> dict[str, Any]:
    """The final report of the job in a folder."""
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return summary


def draw_kills(rng: random.Random, phases: Sequence[str], undisturbed: Outcome) -> list[Kill]:
    """A kill in each of these phases, in random order, at random moments within what it took in an undisturbed run."""
    phases = rng.sample(phases, len(phases))
    return [_draw_kill(rng, phase, undisturbed) for phase in phases]


def _draw_kill(rng: random.Random, phase: str, undisturbed: Outcome) -> Kill:
    seconds = median(entry["seconds"] for entry in undisturbed.record if entry["phase"] == phase)
    most = {"compile": 1, "save": 2}.get(phase, 3)
    return Kill(phase, rng.randrange(2), rng.randint(1, most), rng.uniform(0.0, seconds))


def _wait_for_the_end_of(job: str) -> list[str]:
    """The command lines of the job's processes that are still there after a while; they see by themselves to end."""
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
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return found

