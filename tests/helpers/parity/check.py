"""Train a model in several ways and compare the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import compile_fsdp
from helpers.models.reference import CASES, Case
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type
from helpers.ranks.recording import Collective, record

# Small enough for stable training; otherwise a rounding difference grows tenfold every few steps.
LEARNING_RATE = 0.02


@dataclass
class Parity:
    """Differences and graphs of a parity run, on one rank."""

    worst: float = 0.0  # largest relative difference of a loss or of a parameter's sharded gradient
    differing: list[str] = field(default_factory=list)  # "step 3: layers.0.up.weight"
    directions: list[str] = field(default_factory=list)  # of the graphs that were compiled
    compiled_after_first_step: int = 0
    windows_removed: int = 0

    def fail(self, difference: str) -> None:
        """Add a difference that no number measures."""
        self.differing.append(difference)
        self.worst = math.inf


@dataclass
class Outcome(Parity):
    """One row of the parity table, on one rank."""

    # Collectives of the last step, compiled and eager.
    collectives: tuple[Sequence[Collective], Sequence[Collective]] = ((), ())
    peak_bytes: tuple[int, int] = (0, 0)  # most bytes allocated in the last step, compiled and eager
    # Largest relative difference of losses and gradients to training without sharding, compiled and eager.
    # Training without sharding is in float32, so in low precision this is the error.
    unsharded: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Feature:
    """A feature of FSDP2, as changes to a training run; features that set different attributes can be combined."""

    case: str = "mlp"  # the model, by its name in `helpers.models.reference.CASES`
    # Sizes of the device mesh's dims by name; a size of 0 takes the remaining ranks.
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 0})
    data_mesh: tuple[str, ...] = ()  # names of the dims to shard over; all dims if empty
    # Returns the arguments of `fully_shard` besides the mesh, from the data mesh.
    arguments: Callable[[DeviceMesh], dict[str, Any]] | None = None
    prepare: Callable[[Case], None] | None = None  # called with the new case, before everything else
    on_meta: bool = False  # whether the model is constructed on the meta device
    parallelize: Callable[[Case, DeviceMesh], None] | None = None  # called with the case and the mesh, before sharding
    configure: Callable[[Case], None] | None = None  # called with the case, after sharding
    # Called with the case and the step's number, before each step.
    before_step: Callable[[Case, int], None] | None = None
    step: Callable[[Trainer, int], None] | None = None  # replaces one forward and one backward
    # Returns the modules to shard before the root; the case's blocks if None.
    blocks: Callable[[Case], list[Any]] | None = None
    shard: Callable[..., Any] | None = None  # replaces one call of `fully_shard` per block and one for the root
    # The sharding function: `fully_shard`, or torch's `replicate`, which `make_traceable` makes traceable.
    sharding: Callable[..., Any] = torch_fully_shard
    update: Callable[[Trainer], None] | None = None  # replaces the optimizer's step
    # Creates the optimizer; SGD with momentum if None.
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    graphs: tuple[str, ...] = ("forward", "backward")  # directions of the compiled graphs
    later_graphs: int = 0  # number of graphs that may be compiled after the first step
    has_reference: bool = True  # whether training without sharding computes equal values up to rounding
    low_precision: bool = False  # whether the parameters are gathered in 16 bits
    tolerance: float = 0.0  # largest relative difference to eager FSDP2 of graphs that run op by op


class Trainer:
    """A model in training by one of the compared ways."""

    def __init__(self, feature: Feature, fully_shard: Any) -> None:
        self.feature = feature
        self.case = build_feature(feature, fully_shard)
        self.model = self.case.model
        make = feature.optimizer or _sgd
        self.optimizer = make(self.model)
        self.losses: list[torch.Tensor] = []
        self.batches: list[dict[str, Any]] = []
        self.extras: dict[str, Any] = {}  # state that a feature keeps for this trainer

    def train(self, number: int, batches: list[dict[str, Any]]) -> None:
        """Run forward and backward; keep the gradients."""
        self.losses, self.batches = [], batches
        if self.feature.before_step is not None:
            self.feature.before_step(self.case, number)
        if self.feature.step is not None:
            self.feature.step(self, number)
        else:
            self.forward(0).backward()

    def forward(self, batch: int) -> torch.Tensor:
        loss = loss_of(self.model, self.batches[batch])
        self.losses.append(loss.detach())
        return loss

    def update(self) -> None:
        if self.feature.update is not None:
            self.feature.update(self)
        else:
            self.step_optimizer()

    def step_optimizer(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def build(case_name: str, fully_shard: Any, **kwargs: Any) -> Case:
    """Build the case's model with equal weights at every call, sharded over all ranks."""
    return build_feature(Feature(case=case_name, arguments=lambda _: kwargs), fully_shard)


def build_feature(feature: Feature, fully_shard: Any) -> Case:
    """Build and shard the feature's model with equal weights at every call."""
    torch.manual_seed(0)
    with torch.device("meta" if feature.on_meta else device_type()):
        case = CASES[feature.case]()
    if feature.prepare is not None:
        feature.prepare(case)
    if fully_shard is None:
        return case
    mesh = build_mesh(feature.mesh)
    data_mesh = mesh[feature.data_mesh] if feature.data_mesh else mesh
    if feature.parallelize is not None:
        feature.parallelize(case, mesh)
    arguments = feature.arguments(data_mesh) if feature.arguments is not None else {}
    if feature.shard is not None:
        feature.shard(case, fully_shard, data_mesh, arguments)
    else:
        for module in (*(case.blocks if feature.blocks is None else feature.blocks(case)), case.model):
            fully_shard(module, mesh=data_mesh, **arguments)
    if feature.configure is not None:
        feature.configure(case)
    return case


def build_mesh(sizes: dict[str, int]) -> DeviceMesh:
    known = math.prod(size or 1 for size in sizes.values())
    shape = tuple(size or dist.get_world_size() // known for size in sizes.values())
    return shared_mesh(device_type(), shape, tuple(sizes))


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**batch)
    return getattr(output, "loss", output)


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Unsharded gradients, because a rank's shard may have only a few tiny values."""
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_difference(got: torch.Tensor, expected: torch.Tensor, least: float = 1e-30) -> float:
    """Largest absolute difference over the largest absolute expected value.

    The divisor is at least `least`. 0 for empty tensors, inf for nan.
    """
    if expected.numel() == 0:
        return 0.0
    got = got.to(expected.device)  # offloaded gradients stay on the CPU
    difference = ((got - expected).abs().max() / expected.abs().max().clamp_min(least)).item()
    return difference if math.isfinite(difference) else math.inf


def check_parity(feature: Feature, inner_backend: str, steps: int = 3, **options: Any) -> Outcome:
    """Train by torch's eager FSDP2, ours eager, ours compiled, and unsharded.

    Compares losses and gradients after every step; at the end parameters, buffers, optimizer state, and the keys and
    placements of the state_dict. The outcome lists the differences from torch's eager FSDP2, and the collectives and
    memory of the last step.
    """

    def ours(module: Any, **kwargs: Any) -> Any:
        if feature.sharding is torch_fully_shard:
            return compile_fsdp.fully_shard(module, **kwargs)
        sharded = feature.sharding(module, **kwargs)
        compile_fsdp.make_traceable(module)
        return sharded

    eager, plain, compiled = Trainer(feature, feature.sharding), Trainer(feature, ours), Trainer(feature, ours)
    options = {"inner_backend": inner_backend, **options}
    compiled.model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    trainers = [eager, plain, compiled]
    reference = Trainer(feature, None) if feature.has_reference else None
    outcome = Outcome()
    recorded: dict[int, list[Collective]] = {}
    peaks: dict[int, int] = {}
    first_step_graphs = 0
    # Tensor-parallel ranks share a batch.
    data_rank = dist.get_rank() // (build_mesh(feature.mesh)["tp"].size() if "tp" in feature.mesh else 1)
    for step in range(steps):
        torch.manual_seed(1000 * step + data_rank)
        batches = [eager.case.batch() for _ in range(3)]
        for index, trainer in enumerate(trainers):
            if step == steps - 1:
                recorded[index], peaks[index] = record(partial(trainer.train, step, batches))
            else:
                trainer.train(step, batches)
        _compare_step(outcome, f"run eagerly, step {step}", plain, eager)
        is_equal = _compare_step(outcome, f"compiled, step {step}", compiled, eager)
        if reference is not None:
            differences = _reference_step(reference, (eager,) if is_equal else (compiled, eager), step, batches)
            outcome.unsharded = max(outcome.unsharded[0], differences[0]), max(outcome.unsharded[1], differences[-1])
        for trainer in trainers:
            trainer.update()
        if step == 0:
            first_step_graphs = len(compile_fsdp.reports())
    for trainer, name in ((plain, "run eagerly"), (compiled, "compiled")):
        _compare_end(outcome, name, trainer, eager)
    reports = compile_fsdp.reports()
    outcome.directions = [report.direction for report in reports]
    outcome.compiled_after_first_step = len(reports) - first_step_graphs
    outcome.windows_removed = sum(report.windows_removed for report in reports)
    outcome.collectives = recorded[2], recorded[0]
    outcome.peak_bytes = peaks[2], peaks[0]
    return outcome


def _compare_step(outcome: Outcome, where: str, ours: Trainer, eager: Trainer) -> bool:
    """Compare losses and gradients; return whether the gradients are equal."""
    assert len(ours.losses) == len(eager.losses)
    for mine, theirs in zip(ours.losses, eager.losses, strict=True):
        compare(outcome, f"{where}: loss", mine, theirs)
    return compare_grads(outcome, where, ours.model, eager.model)


def _reference_step(
    reference: Trainer, trainers: Sequence[Trainer], step: int, batches: list[dict[str, Any]]
) -> list[float]:
    """Train unsharded on the mean gradient; return each trainer's largest relative difference."""
    reference.train(step, batches)
    for parameter in reference.model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    expected = full_grads(reference.model)
    worst = []
    for trainer in trainers:
        differences = [relative_difference(a, b) for a, b in zip(trainer.losses, reference.losses, strict=True)]
        got = full_grads(trainer.model)
        for name, grad in expected.items():
            if grad is not None:
                mine = got[name]
                differences.append(1.0 if mine is None else relative_difference(mine, grad))
        worst.append(max(differences))
    reference.update()
    return worst


def _compare_end(outcome: Outcome, who: str, ours: Trainer, eager: Trainer) -> None:
    got, expected = ours.model.state_dict(), eager.model.state_dict()
    if list(got) != list(expected):
        outcome.fail(f"{who}: state_dict has {list(got)}, not {list(expected)}")
        return
    for name, theirs in expected.items():
        mine = got[name]
        if isinstance(theirs, DTensor) and (theirs.placements, theirs.dtype) != (mine.placements, mine.dtype):
            outcome.fail(f"{who}: {name}: {mine.placements} {mine.dtype}")
    pairs: list[Pair] = [(f"{who}: state_dict {name}", got[name], theirs) for name, theirs in expected.items()]
    for mine, theirs in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        states = ours.optimizer.state.get(mine, {}), eager.optimizer.state.get(theirs, {})
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if isinstance(value, torch.Tensor):
                pairs.append((f"{who}: optimizer's {key}", states[0][key], value))
    compare_all(outcome, pairs)


def compare_grads(result: Parity, where: str, ours: nn.Module, eager: nn.Module) -> bool:
    pairs = []
    for (name, mine), (other_name, theirs) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert name == other_name
        if isinstance(mine.grad, DTensor) and isinstance(theirs.grad, DTensor):
            assert mine.grad.placements == theirs.grad.placements, name
            assert mine.grad.to_local().shape == theirs.grad.to_local().shape, name
            assert mine.grad.dtype == theirs.grad.dtype, name
        pairs.append((f"{where}: {name}", mine.grad, theirs.grad))
    return compare_all(result, pairs)


Pair = tuple[str, torch.Tensor | None, torch.Tensor | None]


def compare_all(result: Parity, pairs: Sequence[Pair]) -> bool:
    """Compare pairs of tensors; return whether all are equal on all ranks.

    Gathers full tensors, to measure the differences, only if some shard differs on some rank.
    """
    differs = torch.tensor(float(any(_shards_differ(mine, theirs) for _, mine, theirs in pairs)), device=device_type())
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs:
        return True
    for where, mine, theirs in pairs:
        if mine is not None and theirs is not None:
            compare(result, where, full(mine), full(theirs))
        elif mine is not theirs:
            result.fail(f"{where}: None on one side only")
    return False


def _shards_differ(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is not theirs
    mine, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (mine, theirs))
    return mine.dtype != theirs.dtype or not torch.equal(mine, theirs)


def compare(result: Parity, where: str, got: torch.Tensor, expected: torch.Tensor, least: float = 1e-30) -> None:
    if not torch.equal(got, expected):
        result.differing.append(where)
        result.worst = max(result.worst, relative_difference(got, expected, least))


def more_collectives(compiled: Sequence[Collective], eager: Sequence[Collective]) -> list[str]:
    """List the collectives that a compiled step has beyond the eager step's.

    One collective may replace several that have its bytes together. An all-to-all between two ranks replaces an
    all-gather of equal bytes, or an all-reduce of twice as many bytes. A collective may fit several of the eager ones,
    so both orders of choosing are tried.
    """
    return min((_left_over(compiled, eager, fewest_first) for fewest_first in (False, True)), key=len)


def _left_over(compiled: Sequence[Collective], eager: Sequence[Collective], fewest_first: bool) -> list[str]:
    left, more = list(eager), []
    for each in sorted(compiled, key=lambda each: each.kind == "all_to_all"):
        if not (found := _replaced(each, left, fewest_first)):
            more.append(str(each))
        for other in found:
            left.remove(other)
    return more


def _replaced(each: Collective, left: Sequence[Collective], fewest_first: bool) -> Sequence[Collective]:
    """Return what a collective replaces, all-gathers first or `fewest_first`; empty if nothing."""
    kinds = ("all_gather", "all_reduce") if each.kind == "all_to_all" else (each.kind,)
    ways = [(kind, count) for kind in kinds for count in range(1, len(left) + 1)]
    for kind, count in sorted(ways, key=itemgetter(1)) if fewest_first else ways:
        size = each.bytes * (2 if kind != each.kind and kind == "all_reduce" else 1)
        alike = [other for other in left if other.kind == kind and _is_alike(each, other)]
        for some in combinations(alike, count):
            if sum(other.bytes for other in some) == size:
                return some
    return ()


def _is_alike(each: Collective, other: Collective) -> bool:
    return each.group == other.group and (each.kind != other.kind or each.dtype == other.dtype)
