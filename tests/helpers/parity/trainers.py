"""Run trainers, eager and compiled, on new ranks, because trainers configure their process."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

import compile_fsdp
from helpers.parity.check import Parity, compare, full
from helpers.ranks.forked import run_forked

# Prefix of the line with a program's result.
_MARK = "trained: "


@dataclass
class Trained:
    """A training run on one rank."""

    losses: list[float]  # of each step
    parameters: dict[str, torch.Tensor]  # unsharded parameters after the last step, by FQN

    @classmethod
    def of(cls, losses: list[float], model: nn.Module) -> Trained:
        return cls(losses, {name: full(each.detach()).clone() for name, each in model.named_parameters()})


@dataclass
class Comparison(Parity):
    """Differences between a trainer's compiled run, with its losses, and its eager run, on one rank."""

    losses: list[float] = field(default_factory=list)


def compare_trained(eager: Trained, compiled: Trained) -> Comparison:
    """Compare two runs; take the graphs from this process's reports since `reset_reports`."""
    directions = [report.direction for report in compile_fsdp.reports()]
    result = Comparison(losses=compiled.losses, directions=directions)
    assert eager.parameters.keys() == compiled.parameters.keys()
    for name, expected in eager.parameters.items():
        compare(result, name, compiled.parameters[name], expected)
    for i, losses in enumerate(zip(compiled.losses, eager.losses, strict=True)):
        compare(result, f"loss {i}", *map(torch.tensor, losses))
    return result


def train_both(train: Callable[[bool], Trained]) -> Comparison:
    """Train eagerly, then compiled; `train` gets whether to compile."""
    eager = train(False)
    assert compile_fsdp.reports() == ()
    return compare_trained(eager, train(True))


def compare_resumed(
    result: Comparison, expected: Trained | None, resume: Callable[[bool, bool], Trained]
) -> Comparison:
    """Add the differences of runs that resume from a checkpoint, for eager and compiled savers and resumers.

    Args:
        result: Comparison of the uninterrupted runs.
        expected: The rest of the uninterrupted eager run; None to compare with the first resumed run.
        resume: Resumes a run, given whether the saver and the resumer compile.
    """
    for saved_by, resumed_by in itertools.product((False, True), repeat=2):
        again = resume(saved_by, resumed_by)
        expected = expected or again
        differing = compare_trained(expected, again).differing
        result.differing += [f"{saved_by} to {resumed_by}: {name}" for name in differing]
    return result


def run_scenario(scenarios: Mapping[str, Callable[[], Comparison]], name: str) -> None:
    """Run one scenario in a program and print its result for `run_trainer`."""
    print(f"\n{_MARK}{json.dumps(asdict(scenarios[name]()))}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_trainer(folder: Path, program: Path, scenario: str) -> list[Comparison]:
    """Run a program's scenario on two ranks; return the results, by rank."""
    output = run_forked(folder, program, scenario)
    found = [Comparison(**json.loads(line)) for line in re.findall(rf"^{_MARK}(.*)$", output, flags=re.MULTILINE)]
    assert len(found) == 2, output
    return found
