"""Runs of a trainer, eager and compiled, on ranks of their own: trainers set up their whole process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

import compile_fsdp
from helpers.parity.check import full, relative_difference
from helpers.ranks.forked import run_forked

# In front of what a program tells.
_MARK = "trained: "


@dataclass
class Trained:
    """A training run on one rank.

    Attributes:
        losses: Of the steps.
        parameters: By FQN, unsharded, after the last step.
    """

    losses: list[float]
    parameters: dict[str, torch.Tensor]

    @classmethod
    def of(cls, losses: list[float], model: nn.Module) -> Trained:
        return cls(losses, {name: full(each.detach()).clone() for name, each in model.named_parameters()})


@dataclass
class Comparison:
    """What a compiled run of a trainer did that its eager run did not, on one rank.

    Attributes:
        losses: Of the compiled run.
        differing: Losses and parameters that are not equal, bit by bit.
        worst: Largest relative difference among them.
        graphs: Directions of the graphs that were compiled.
    """

    losses: list[float]
    differing: list[str] = field(default_factory=list)
    worst: float = 0.0
    graphs: list[str] = field(default_factory=list)


def compare_trained(eager: Trained, compiled: Trained) -> Comparison:
    """Compare two runs; the graphs are those that this process has reported since `reset_reports`."""
    result = Comparison(compiled.losses, graphs=[report.direction for report in compile_fsdp.reports()])
    assert eager.parameters.keys() == compiled.parameters.keys()
    pairs = {name: (compiled.parameters[name], eager.parameters[name]) for name in eager.parameters}
    for i, losses in enumerate(zip(compiled.losses, eager.losses, strict=True)):
        pairs[f"loss {i}"] = (torch.tensor(losses[0]), torch.tensor(losses[1]))
    for name, (got, expected) in pairs.items():
        if not torch.equal(got, expected):
            result.differing.append(name)
            result.worst = max(result.worst, relative_difference(got, expected))
    return result


def train_both(train: Callable[[bool], Trained]) -> Comparison:
    """Train eagerly and compiled; `train` is told whether to compile."""
    eager = train(False)
    assert compile_fsdp.reports() == ()
    return compare_trained(eager, train(True))


def run_scenario(scenarios: Mapping[str, Callable[[], Comparison]], name: str) -> None:
    """What a program does: one scenario, told to `run_trainer`."""
    print(f"\n{_MARK}{json.dumps(asdict(scenarios[name]()))}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_trainer(folder: Path, program: Path, scenario: str) -> list[Comparison]:
    """Run a scenario of a program on two ranks that start in `folder`."""
    output = run_forked(folder, program, scenario)
    found = [Comparison(**json.loads(line)) for line in re.findall(rf"^{_MARK}(.*)$", output, flags=re.MULTILINE)]
    assert len(found) == 2, output
    return found
