"""Random training loops observe equal values in eager and compiled runs.

Loops are drawn from consecutive seeds. To run more or different loops:
`COMPILE_FSDP_TEST_LOOPS=500 COMPILE_FSDP_TEST_FIRST_LOOP=1000 pytest -m slow parity/test_random_loops.py`.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.errors import CompileFSDPError
from compile_fsdp.replay import bundle
from compile_fsdp.tools.launch import RankError, RankLost
from helpers.models.loop_training import Seen, Training, Verdict
from helpers.models.random_loops import Action, Loop, random_loop
from helpers.models.replays import compile_with_replay
from helpers.parity.check import full, relative_difference
from helpers.ranks.pools import device_type, run_ranks

TRAINED, REFUSED_BY_EAGER, REFUSED_BY_NAME, FAILED = "trained", "refused by eager", "refused by name", "failed"

UNSHARDED = 1e-5  # largest relative difference of eager FSDP2 to training without sharding
_PRINTED = {REFUSED_BY_NAME, FAILED} | ({REFUSED_BY_EAGER} if os.environ.get("COMPILE_FSDP_TEST_VERBOSE") else set())
LEAST_TRAINED = 0.6  # share of the drawn loops
FIRST = int(os.environ.get("COMPILE_FSDP_TEST_FIRST_LOOP", "0"))
# Numbers of loops. Inductor and the emulated device run fewer, because both are several times slower.
OP_BY_OP, WITH_PASSES = (500, 50) if device_type() == "cpu" else (100, 10)
OP_BY_OP = int(os.environ.get("COMPILE_FSDP_TEST_LOOPS", OP_BY_OP))
WITH_PASSES = int(os.environ.get("COMPILE_FSDP_TEST_LOOPS_WITH_PASSES", WITH_PASSES))


def _train(rank: int, loop: Loop, folder: str) -> Verdict:
    """Compare compiled training with eager FSDP2, and eager FSDP2 with unsharded training if possible.

    With Inductor, train once more from the bundle that the first training has written into the folder, and on the
    emulated device once more in device graphs.
    """
    bundle.own_folder, has_graphs = lambda: Path(folder), device_type() != "cpu"
    eager = Training(loop, torch_fully_shard, rank)
    if (verdict := _train_eagerly(eager)).outcome != TRAINED:
        return verdict
    ours, verdict = _train_compiled(loop, rank)
    difference = _first_difference(ours.seen, eager.seen, loop.tolerance)
    if difference is None and verdict.outcome == TRAINED and loop.has_reference:
        difference = _difference_to_unsharded(loop, eager, rank)
    if difference is None and verdict.outcome == TRAINED and loop.inner_backend == "inductor":
        again, verdict = _train_compiled(loop, rank)
        if (found := _first_difference(again.seen, ours.seen, 0.0)) is not None:
            difference = f"from a bundle, {found}"
    if difference is None and verdict.outcome == TRAINED and loop.inner_backend == "inductor" and has_graphs:
        torch._dynamo.reset()  # the third compilation of a process would hit Dynamo's limit
        replayed, of_graphs = _train_compiled(loop, rank, **{"triton.cudagraphs": True})
        if of_graphs.outcome == FAILED:
            return of_graphs
        # Matrix products on a CPU round by the alignment of their memory.
        if (found := _first_difference(replayed.seen, ours.seen, loop.tolerance)) is not None:
            difference = f"in device graphs, {found}"
    return verdict if difference is None else Verdict(FAILED, difference)


def _train_compiled(loop: Loop, rank: int, **further: Any) -> tuple[Training, Verdict]:
    ours = Training(loop, compile_fsdp.fully_shard, rank)
    compiles = compile_with_replay if loop.replay and loop.inner_backend != "inductor" else nn.Module.compile
    options = {"inner_backend": loop.inner_backend, "progress": False, **further}
    compiles(ours.model, backend="compile_fsdp", fullgraph=True, options=options)
    try:
        ours.run()
    except CompileFSDPError as error:
        return ours, Verdict(REFUSED_BY_NAME, f"{ours.where}: {_first_line(error)}")
    except Exception as error:
        return ours, Verdict(FAILED, f"{ours.where}: {_first_line(error)}\n{traceback.format_exc()}")
    return ours, Verdict(TRAINED)


def _train_eagerly(eager: Training) -> Verdict:
    try:
        eager.run()
    except Exception as error:
        return Verdict(REFUSED_BY_EAGER, f"{eager.where}: {_first_line(error)}")
    return Verdict(TRAINED)


def _train_eager_alone(rank: int, loop: Loop) -> Verdict:
    return _train_eagerly(Training(loop, torch_fully_shard, rank))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def _first_difference(ours: list[Seen], eager: list[Seen], tolerance: float) -> str | None:
    """Describe the first value that differs; None if all values are equal."""
    for mine, theirs in zip(ours, eager, strict=False):
        if mine.where != theirs.where:
            return f"{mine.where} where eager FSDP2 has {theirs.where}"
        if mine.value is None or theirs.value is None:
            if mine.value is not theirs.value:
                return f"{mine.where}: None on one side only, {'compiled' if mine.value is None else 'eager'}"
        elif mine.value.shape != theirs.value.shape:
            return f"{mine.where}: {mine.value.shape} where eager FSDP2 has {theirs.value.shape}"
        elif (difference := relative_difference(mine.value, theirs.value)) > tolerance:
            return f"{mine.where}: differs by {difference:.1e}"
    return None


def _difference_to_unsharded(loop: Loop, eager: Training, rank: int) -> str | None:
    """Describe the first loss or final parameter that differs from unsharded training; None if all agree."""
    reference = Training(loop, None, rank)
    try:
        reference.run()
    except RuntimeError:
        return None  # a penalty saved a parameter that an optimizer updated in place; FSDP2 saves gathered copies
    pairs = [
        (mine.where, mine.value, theirs.value)
        for mine, theirs in zip(eager.seen, reference.seen, strict=True)
        if mine.where.endswith(": loss")
    ]
    named = zip(eager.model.named_parameters(), reference.model.parameters(), strict=True)
    pairs += [(f"{name} in the end", full(mine).detach(), theirs.detach()) for (name, mine), theirs in named]
    for where, mine, theirs in pairs:
        if (difference := relative_difference(mine, theirs)) > UNSHARDED:
            return f"{where}: differs by {difference:.1e} from training without sharding"
    return None


def _check(loop: Loop) -> Verdict:
    """Return the worst verdict of all ranks on a loop."""
    try:
        with TemporaryDirectory() as folder:
            verdicts = run_ranks(2, _train, loop, folder, timeout_s=240.0)
    except (RankError, RankLost) as error:  # a rank hung, died or raised outside of the loop
        try:
            run_ranks(2, _train_eager_alone, loop, timeout_s=30.0)
        except (RankError, RankLost) as of_eager:  # it read a parameter that FSDP2 had freed
            return Verdict(REFUSED_BY_EAGER, str(of_eager).splitlines()[0])
        return Verdict(FAILED, str(error))
    for outcome in (FAILED, REFUSED_BY_NAME, REFUSED_BY_EAGER):
        for verdict in verdicts:
            if verdict.outcome == outcome:
                return verdict
    return verdicts[0]


def _check_many(count: int, inner_backend: str) -> None:
    """Train the loops of `count` seeds; fail with every loop that differs, or if too few train."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(FIRST, FIRST + count):
        verdict = _check(loop := random_loop(seed, inner_backend))
        outcomes[verdict.outcome] += 1
        if verdict.outcome in _PRINTED:
            print(f"{verdict.outcome}: {loop}\n  {verdict.reason}", flush=True)
        if verdict.outcome == FAILED:
            failures.append(f"{loop}\n  {verdict.reason}")
    print(", ".join(f"{outcome}: {number}" for outcome, number in outcomes.items()))
    assert not failures, "\n\n".join(failures)
    assert outcomes[TRAINED] >= LEAST_TRAINED * count, outcomes


FORWARD, BACKWARD, STEP = Action("forward"), Action("backward"), Action("step")
EVALUATION, ZERO, FREEZE_END = Action("no_grad"), Action("zero_grad", value=True), Action("requires_grad", "end", False)
# Shrunk from loops that once failed.
KEPT = {
    # Eager FSDP2 trains with the last layer of the evaluation, which leaves the root unsharded.
    "a step between an evaluation and a forward": Loop(
        "mlp", ((FORWARD, BACKWARD, EVALUATION, STEP, ZERO), (FORWARD, BACKWARD, STEP))
    ),
    "a step without gradients behind evaluations": Loop(
        "mlp", ((FORWARD, BACKWARD, STEP, ZERO, EVALUATION, EVALUATION, STEP, ZERO), (FORWARD, BACKWARD, STEP))
    ),
    "the last layer is frozen behind an evaluation": Loop(
        "mlp", ((FORWARD, BACKWARD, STEP, ZERO, EVALUATION, FREEZE_END), *((FORWARD, BACKWARD, STEP, ZERO),) * 2)
    ),
    # On the emulated device, the compiled backward has to wait for the eager backward's reduction.
    "eager code reduces before a compiled backward adds": Loop(
        "mlp", ((FORWARD, BACKWARD), (FORWARD, Action("stance", value="force_eager"), FORWARD, BACKWARD))
    ),
    "a block is frozen behind a forward that is run again": Loop(
        "mlp",
        (
            (FORWARD, BACKWARD, STEP),
            (FORWARD, BACKWARD, STEP),
            (FORWARD, Action("requires_grad", "blocks.1", False), BACKWARD, Action("requires_grad", "blocks.1", True)),
            (FORWARD, Action("requires_grad", "blocks.1", False), BACKWARD, STEP),
            (FORWARD, BACKWARD),
        ),
        replay=True,
    ),
    "a block is frozen between forward and backward": Loop(
        "mlp", ((FORWARD, Action("requires_grad", "blocks.1", False), BACKWARD), (FORWARD, BACKWARD))
    ),
    "a block is frozen while it is unsharded, before another block runs alone": Loop(
        "kept",
        (
            (FORWARD, BACKWARD),
            (FORWARD, Action("requires_grad", "blocks.0", False), Action("part", "blocks.1"), BACKWARD),
        ),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_regression_loop_matches_eager(name: str) -> None:
    assert _check(KEPT[name]) == Verdict(TRAINED)


@pytest.mark.parametrize("seed", range(12))
def test_random_loop_matches_eager_or_is_refused(seed: int) -> None:
    verdict = _check(loop := random_loop(seed))
    assert verdict.outcome != FAILED, f"{loop}\n  {verdict.reason}"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("inner_backend", "count"), [("aot_eager", OP_BY_OP), ("inductor", WITH_PASSES)])
def test_many_random_loops_match_eager(inner_backend: str, count: int) -> None:
    _check_many(count, inner_backend)
