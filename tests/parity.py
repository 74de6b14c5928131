"""Train the same model twice on the same ranks, by torch's eager FSDP2 and compiled, and compare every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from models import CASES, Case

# Small enough for stable training: otherwise a rounding difference of one step grows tenfold every few steps.
LEARNING_RATE = 0.02


@dataclass
class Parity:
    """What a parity run saw, on one rank."""

    worst: float = 0.0  # largest relative difference of a loss or of a parameter's sharded gradient
    differing: list[str] = field(default_factory=list)  # "step 3: layers.0.up.weight"
    directions: list[str] = field(default_factory=list)  # of the graphs that were compiled
    compiled_after_first_step: int = 0
    windows_removed: int = 0


def build(case_name: str, fully_shard: Any, **kwargs: Any) -> Case:
    """The case's model with the same weights on every rank and at every call, sharded over all ranks."""
    torch.manual_seed(0)
    case = CASES[case_name]()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*case.blocks, case.model):
        fully_shard(module, mesh=mesh, **kwargs)
    return case


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**batch)
    return getattr(output, "loss", output)


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of all ranks put together: a single rank's shard may have but a few, tiny values."""
    return {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}


def relative_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def train_both(
    rank: int, case_name: str, inner_backend: str, steps: int, fullgraph: bool = True, **kwargs: Any
) -> Parity:
    """Train `steps` steps of SGD; gradients are compared before each optimizer step."""
    eager = build(case_name, torch_fully_shard, **kwargs)
    ours = build(case_name, compile_fsdp.fully_shard, **kwargs)
    ours.model.compile(
        backend="compile_fsdp", fullgraph=fullgraph, options={"inner_backend": inner_backend}
    )
    optimizers = [torch.optim.SGD(case.model.parameters(), lr=LEARNING_RATE) for case in (eager, ours)]
    result = Parity()
    graphs_after_first_step = 0
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        batch = eager.batch()
        losses = []
        for case in (eager, ours):
            loss = loss_of(case.model, batch)
            loss.backward()
            losses.append(loss.detach())
        compare(result, f"step {step}: loss", losses[1], losses[0])
        compare_grads(result, f"step {step}", ours.model, eager.model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            graphs_after_first_step = len(compile_fsdp.reports())
    reports = compile_fsdp.reports()
    result.directions = [report.direction for report in reports]
    result.compiled_after_first_step = len(reports) - graphs_after_first_step
    result.windows_removed = sum(report.windows_removed for report in reports)
    return result


def compare_grads(result: Parity, where: str, ours: nn.Module, eager: nn.Module) -> None:
    got, expected = full_grads(ours), full_grads(eager)
    assert got.keys() == expected.keys()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if mine.grad is not None and theirs.grad is not None:
            assert mine.grad.placements == theirs.grad.placements, name
            assert mine.grad.to_local().shape == theirs.grad.to_local().shape, name
    for name, grad in expected.items():
        if grad is None or got[name] is None:
            if got[name] is not grad:
                result.differing.append(f"{where}: {name}: None on one side only")
                result.worst = float("inf")
            continue
        compare(result, f"{where}: {name}", got[name], grad)


def compare(result: Parity, where: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        result.differing.append(where)
        result.worst = max(result.worst, relative_difference(got, expected))
