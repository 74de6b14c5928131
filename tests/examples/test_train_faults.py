"""examples/train.py with killed ranks: restarts continue the loss curve, and surviving ranks end."""

from __future__ import annotations

import functools
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.faults import jobs
from helpers.ranks.forked import start_ranks

SLOW = pytest.mark.slow
TIMEOUT_S = 30
LIMIT_S = 240.0  # start, imports and compilation come before
Undisturbed = Callable[[str, int], jobs.Outcome]
TWO_OF_EACH = 2 * jobs.PHASES


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run without kills, by inner backend and number of steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda inner, steps: jobs.run_job(folder / f"{inner}_{steps}", steps, [], inner))


@pytest.mark.timeout(3600)  # beside other work, a start takes from ten seconds to a minute
@pytest.mark.parametrize(
    ("seed", "phases", "inner_backend"),
    [
        # `make test` kills in a save and while compiling, and resumes checkpoints: tests/state/test_kills.py,
        # tests/state/test_continue.py and the test below.
        # This seed's rank dies in its third backward, behind the first save.
        pytest.param(12, ("backward",), "aot_eager", id="1 kill", marks=SLOW),
        *(pytest.param(n, TWO_OF_EACH, "aot_eager", id=f"10 kills, seed {n}", marks=SLOW) for n in (1, 2, 3, 4)),
        pytest.param(5, TWO_OF_EACH, "inductor", id="10 kills, Inductor", marks=SLOW),
    ],
)
def test_restarts_continue_the_loss_curve(
    seed: int, phases: tuple[str, ...], inner_backend: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # So many that the last of the kills comes to pass, and a start after it.
    steps = jobs.STEPS_BETWEEN_KILLS * len(phases) + jobs.SAVE_EVERY
    expected = undisturbed(inner_backend, steps)
    kills = jobs.draw_kills(random.Random(seed), phases, expected)
    if inner_backend == "inductor":
        kills.sort(key=lambda kill: kill.phase != "compile")  # first, while there is nothing in Inductor's caches
    outcome = jobs.run_job(tmp_path / "killed", steps, kills, inner_backend)
    planned = [{"start": start, "phase": kill.phase, "rank": kill.rank} for start, kill in enumerate(kills)]
    assert outcome.record == planned
    assert Counter(kill.phase for kill in kills) == Counter(phases)
    assert outcome.losses == expected.losses
    assert outcome.first_step > 0
    assert not list((tmp_path / "killed" / jobs.CHECKPOINTS).glob("*.part"))
    print(f"{expected.seconds:.0f} s undisturbed, {outcome.seconds:.0f} s with {len(kills)} kills")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("compile", f"expected rank 1 to compile its forward graph within {TIMEOUT_S} s, got nothing from it"),
        ("backward", "gloo"),
        ("save", "gloo"),
    ],
)
def test_survivor_of_a_killed_rank_ends_with_an_error(phase: str, expected: str, tmp_path: Path) -> None:
    """Without torchrun, which would end the surviving rank."""
    folder = tmp_path / "job"
    kill = jobs.Kill(phase, rank=1, occurrence=1, delay_s=0.0)
    job = jobs.prepare(folder, steps=20, kills=[kill], inner_backend="aot_eager", timeout_s=TIMEOUT_S)
    ranks = start_ranks(folder, job)
    try:
        (code, output), (lost, _) = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        ranks[0].ranks.kill()
    assert (code, lost) == (1, -signal.SIGKILL), output
    assert "Traceback" in output and expected in output, output
    assert "Timed out" not in output  # the connection breaks at once
