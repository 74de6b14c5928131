"""`estimate`: put a traced step and FSDP2's schedule together."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import sympy
from torch import nn

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.amounts import Amount, B, N, S, constant, dominates, maximal, maximum, total
from compile_fsdp.tools.planning.polynomials import Fit
from compile_fsdp.tools.planning.schedule import Backend, Schedule
from compile_fsdp.tools.planning.sizes import group_sizes
from compile_fsdp.tools.planning.tracing import Batch, Mark, Point, Trace, trace_step
from compile_fsdp.wrap import Plan, plan

Events = list[tuple[Mark | None, Amount]]


class Optimizer(enum.Enum):
    """An optimizer, by what it keeps between steps; step counters, 4 bytes a parameter tensor, are not counted."""

    ADAMW = "adamw"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"

    @property
    def states(self) -> int:
        """Tensors of a sharded parameter's size that the optimizer keeps for each parameter."""
        return {Optimizer.ADAMW: 2, Optimizer.SGD: 0, Optimizer.SGD_MOMENTUM: 1}[self]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One training step on one rank, eager FSDP2: expressions in N ranks, B sequences of S tokens on each rank.

    All are in bytes, but for the two counts. Figures are for the first rank, which has the most rows.

    Attributes:
        parameters: Sharded parameters, rows that pad an uneven split included; parameters in no group are whole.
        gradients: Sharded gradients after the backward, of the parameters that get one, with their padding.
        optimizer: State of the optimizer.
        buffers: Buffers of modules, which are not sharded.
        batch: The tensors that the forward takes.
        activations: What the forward leaves to the backward.
        unsharded: Gathered parameters and the buffers of gathers, at most.
        peak: All of these together with what the step allocates in between, at most.
        all_gathers: Number of all-gathers.
        reduce_scatters: Number of reduce-scatters.
        gathered: What a rank receives from other ranks in all-gathers.
        reduced: What a rank receives in reduce-scatters by a ring, in which each rank sends as much.
    """

    parameters: sympy.Expr
    gradients: sympy.Expr
    optimizer: sympy.Expr
    buffers: sympy.Expr
    batch: sympy.Expr
    activations: sympy.Expr
    unsharded: sympy.Expr
    peak: sympy.Expr
    all_gathers: sympy.Expr
    reduce_scatters: sympy.Expr
    gathered: sympy.Expr
    reduced: sympy.Expr

    def formulas(self) -> dict[str, sympy.Expr]:
        """The expressions of the estimate by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def at(self, ranks: int, batch: int = 1, seq_len: int = 1) -> dict[str, int]:
        """The values on `ranks` ranks, with `batch` sequences of `seq_len` tokens on each where that was left open.

        Raises:
            EstimateError: fewer than two ranks, which gather nothing, or an empty batch.
        """
        if ranks < 2 or batch < 1 or seq_len < 1:
            raise EstimateError(
                f"expected at least 2 ranks and 1 token, got {ranks} ranks, a batch of {batch} and sequences of "
                f"{seq_len}; correct the sizes"
            )
        values = {N: ranks, B: batch, S: seq_len}
        return {name: int(sympy.ceiling(formula.subs(values))) for name, formula in self.formulas().items()}


def estimate(
    model: nn.Module | Plan,
    batch: Batch | Callable[[int, int], Batch],
    *,
    near: tuple[int, int] = (2, 64),
    optimizer: Optimizer = Optimizer.ADAMW,
    forward_prefetch: int = 0,
    backward_prefetch: int = 1,
    backend: Backend = Backend.NCCL,
) -> Estimate:
    """Estimate a step of forward and backward, and what stays between steps, without data and without ranks.

    Args:
        model: Returns the loss, or an output with a `loss`; on the meta device or any other. Or a plan of
            `compile_fsdp.wrap`, where other groups or arguments of `fully_shard` than `plan(model)` has are meant.
            The mesh of a plan says nothing: ranks are a symbol.
        batch: Keyword arguments of a forward, of which shapes and dtypes count; or a function of the number of
            sequences and their length that returns them. Then formulas have B and S.
        near: Sizes of that batch that the model takes. Smaller sequences are traced as well.
        optimizer: The optimizer whose state is counted.
        forward_prefetch: Groups that each group's forward gathers ahead, set on all of them and the root.
        backward_prefetch: Groups that each group's backward gathers ahead; 1 is FSDP2's own prefetch.
        backend: The collectives' backend, whose own copies are counted.
    Raises:
        EstimateError: the plan or the model has a feature that cannot be estimated.
        PlanError: the model's default plan cannot be applied.
    """
    if forward_prefetch < 0 or backward_prefetch < 1:
        raise EstimateError(
            f"expected forward_prefetch of at least 0 and backward_prefetch of at least 1, got {forward_prefetch} and "
            f"{backward_prefetch}; FSDP2 has no others"
        )
    planned = model if isinstance(model, Plan) else plan(model)
    sizes = group_sizes(planned)
    fit = Fit.near(*near) if callable(batch) else Fit.constant()
    traces = [trace_step(planned, batch(*point) if callable(batch) else batch) for point in fit.points]
    events = list(_merge(traces, fit))
    marks = [mark for mark, _ in events if mark is not None]
    execution = list(dict.fromkeys(mark.group for mark in marks if mark.point is Point.PRE_FORWARD))
    schedule = Schedule(sizes, execution, forward_prefetch, backward_prefetch, backend)

    in_groups = {fqn for each in sizes for fqn in each.parameters}
    whole = {fqn: each for fqn, each in planned.root.named_parameters() if fqn not in in_groups}
    trainable = [[fqn for fqn, each in group.parameters.items() if each.requires_grad] for group in sizes]
    parameters = total(each.shards() for each in sizes) + constant(sum(each.nbytes for each in whole.values()))
    updated = total(each.shards(fqns) for each, fqns in zip(sizes, trainable, strict=True)) + constant(
        sum(each.nbytes for each in whole.values() if each.requires_grad)
    )
    state = total([updated] * optimizer.states)
    buffers = constant(sum(each.nbytes for each in planned.root.buffers()))
    inputs = fit.polynomial([trace.input_bytes for trace in traces])
    persistent = total([parameters, state, buffers, inputs])

    unsharded: list[Amount] = []
    peaks: list[Amount] = []
    activations = next(alive for mark, alive in events if mark is not None and mark.point is Point.FORWARD_END)
    for mark, alive in events:
        for level in [schedule.level] if mark is None else schedule.advance(mark):
            peaks.append(persistent + level + alive)
        unsharded.append(schedule.unsharded)
    return Estimate(
        parameters=parameters.expression(),
        gradients=updated.expression(),
        optimizer=state.expression(),
        buffers=buffers.expression(),
        batch=inputs.expression(),
        activations=activations.expression(),
        unsharded=maximum(unsharded),
        peak=maximum(peaks),
        all_gathers=sympy.Integer(len(schedule.gathers)),
        reduce_scatters=sympy.Integer(len(schedule.reductions)),
        gathered=(N - 1) * total(schedule.gathers).expression(),
        reduced=(N - 1) * total(schedule.reductions).expression(),
    )


def _merge(traces: list[Trace], fit: Fit) -> Iterator[tuple[Mark | None, Amount]]:
    """Merge the events of all traces: bytes alive become polynomials, and of allocations the largest stays.

    Raises:
        EstimateError: the traces are not of the same operations.
    """
    steps = [[mark for mark, _ in trace.events] for trace in traces]
    if any(step != steps[0] for step in steps):
        raise EstimateError(
            "expected the same operations for every batch, got others for some sizes; pass a batch of fixed size"
        )
    largest: list[Amount] = []
    for mark, *values in zip(steps[0], *([alive for _, alive in trace.events] for trace in traces), strict=True):
        alive = fit.polynomial(values)
        if mark is None:
            if not any(dominates(other, alive) for other in largest):
                largest = maximal([*largest, alive])
        else:
            yield from ((None, each) for each in largest)
            largest = []
            yield mark, alive
