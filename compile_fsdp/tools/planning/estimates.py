"""`estimate`: combine a traced step with FSDP2's schedule."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import sympy
from torch import nn

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.amounts import Amount, B, N, S, constant, dominates, maximal, maximum, total
from compile_fsdp.tools.planning.pipelines import WHOLE, Place
from compile_fsdp.tools.planning.polynomials import Fit
from compile_fsdp.tools.planning.schedule import Backend, Schedule
from compile_fsdp.tools.planning.sizes import group_sizes
from compile_fsdp.tools.planning.tracing import Batch, Mark, Point, Trace, trace_step
from compile_fsdp.wrap import Plan, plan

Events = list[tuple[Mark | None, Amount]]


class Optimizer(enum.Enum):
    """An optimizer, of which only the state counts; step counters, 4 bytes per parameter tensor, are left out."""

    ADAMW = "adamw"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"

    @property
    def states(self) -> int:
        """Tensors of a sharded parameter's size that the optimizer keeps for each parameter."""
        return {Optimizer.ADAMW: 2, Optimizer.SGD: 0, Optimizer.SGD_MOMENTUM: 1}[self]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and communication of one training step of eager FSDP2 on the first rank, which has the most rows.

    All attributes are expressions in N ranks that shard and B sequences of S tokens per rank; all but the two counts
    are in bytes.

    Attributes:
        parameters: Sharded parameters, with the padding of uneven splits; parameters in no group count as a whole.
        gradients: Sharded gradients after the backward, with padding, of the parameters that require one.
        optimizer: State of the optimizer.
        buffers: Buffers of modules, which are not sharded.
        batch: Input tensors of the forward.
        activations: Tensors that the forward saves for the backward.
        unsharded: Peak of unsharded parameters and all-gather buffers.
        peak: Peak of all memory, including what the step allocates for a while.
        reserved: Sum of the peaks of the streams of a GPU, which do not share memory: what the process keeps at least,
            without the optimizer's step and without fragments.
        all_gathers: Number of all-gathers.
        reduce_scatters: Number of reduce-scatters.
        gathered: Bytes that a rank receives from other ranks in all-gathers.
        reduced: Bytes that a rank receives in reduce-scatters by a ring, in which a rank sends as many bytes.
        all_reduced: Bytes that a rank receives in all-reduces over the replicas by rings, one for each reduce-scatter.
        received: Bytes that a rank receives from the stages before and after its own, to which it sends as many.
    """

    parameters: sympy.Expr
    gradients: sympy.Expr
    optimizer: sympy.Expr
    buffers: sympy.Expr
    batch: sympy.Expr
    activations: sympy.Expr
    unsharded: sympy.Expr
    peak: sympy.Expr
    reserved: sympy.Expr
    all_gathers: sympy.Expr
    reduce_scatters: sympy.Expr
    gathered: sympy.Expr
    reduced: sympy.Expr
    all_reduced: sympy.Expr
    received: sympy.Expr

    def formulas(self) -> dict[str, sympy.Expr]:
        """The expressions of the estimate by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def at(self, ranks: int, batch: int = 1, seq_len: int = 1) -> dict[str, int]:
        """The values of all attributes on `ranks` ranks, for `batch` sequences of `seq_len` tokens if B and S occur.

        Raises:
            EstimateError: there are fewer than two ranks, or the batch is empty.
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
    replicas: int = 1,
    place: Place = WHOLE,
) -> Estimate:
    """Estimate memory and communication of one training step, without data and without other ranks.

    Args:
        model: A model on any device, meta included, that returns the loss or an output with a `loss`; or a plan of
            `compile_fsdp.wrap`, if its groups or arguments of `fully_shard` are not those of `plan(model)`. The size of
            a plan's mesh does not count, since the number of ranks is a symbol.
        batch: Keyword arguments of the forward, of which shapes and dtypes count; or a function of the number of
            sequences and their length that returns such arguments, for formulas in B and S.
        near: (sequences, length) to trace a `batch` function at; up to 2 sequences more and smaller lengths follow.
        optimizer: The optimizer whose state is counted.
        forward_prefetch: Number of groups that each group, the root included, gathers ahead in the forward.
        backward_prefetch: Number of groups that each group gathers ahead in the backward; 1 is FSDP2's own prefetch.
        backend: The backend of the collectives, whose own copies are counted.
        replicas: Number of sets of N ranks that each hold all parameters, sharded (HSDP): the first dim of a mesh of
            two. Gradients are reduced over them after each reduce-scatter.
        place: Of the stage of a pipeline that the model is; its batch is a microbatch. See [Note: 1F1B].
    Raises:
        EstimateError: the plan or the model has a feature that cannot be estimated.
        PlanError: the model's default plan cannot be applied.
    """
    if forward_prefetch < 0 or backward_prefetch < 1:
        raise EstimateError(
            f"expected forward_prefetch of at least 0 and backward_prefetch of at least 1, got {forward_prefetch} and "
            f"{backward_prefetch}; FSDP2 has no others"
        )
    if replicas < 1:
        raise EstimateError(f"expected at least 1 replica, got replicas={replicas}; pass 1 for none beside it")
    planned = model if isinstance(model, Plan) else plan(model)
    sizes = group_sizes(planned)
    fit = Fit.near(*near) if callable(batch) else Fit.constant()
    traces = [trace_step(planned, batch(*point) if callable(batch) else batch, place) for point in fit.points]
    events = list(_merge(traces, fit))
    marks = [mark for mark, _ in events if mark is not None]
    execution = list(dict.fromkeys(mark.group for mark in marks if mark.point is Point.PRE_FORWARD))
    schedule = Schedule(sizes, execution, forward_prefetch, backward_prefetch, backend, replicas)

    in_groups = {fqn for each in sizes for fqn in each.parameters}
    whole = {fqn: each for fqn, each in planned.root.named_parameters() if fqn not in in_groups}
    trainable = [[fqn for fqn, each in group.parameters.items() if each.requires_grad] for group in sizes]
    parameters = total(each.shards() for each in sizes) + constant(sum(each.nbytes for each in whole.values()))
    updated = total(each.shards(fqns) for each, fqns in zip(sizes, trainable, strict=True)) + constant(
        sum(each.nbytes for each in whole.values() if each.requires_grad)
    )
    state = total([updated] * optimizer.states)
    buffers = constant(sum(each.nbytes for each in planned.root.buffers()))
    inputs = total([fit.polynomial([trace.input_bytes for trace in traces])] * place.microbatches)
    received = total([fit.polynomial([trace.received_bytes for trace in traces])] * place.microbatches)
    # Of the microbatches that are not traced, too. See [Note: 1F1B].
    more = place.microbatches - place.traced
    gradients = total([fit.polynomial([trace.input_gradient_bytes for trace in traces])] * more)
    persistent = total([parameters, state, buffers, inputs, gradients])

    unsharded: list[Amount] = []
    peaks: list[Amount] = []
    computing: list[Amount] = []
    gathered: list[Amount] = []
    reduced: list[Amount] = []
    ends = [alive for mark, alive in events if mark is not None and mark.point is Point.FORWARD_END]
    activations = ends[place.in_flight - 1]
    repeated = _between_rounds(marks) * more
    rounds = 0
    for mark, alive in events:
        if mark is not None and mark.point is Point.ROUND:
            rounds += 1
            for each in repeated if rounds == 2 else ():
                deque(schedule.advance(each), maxlen=0)
        for held in [schedule.held] if mark is None else schedule.advance(mark):
            peaks.append(persistent + held.total + alive)
            computing.append(persistent + held.computing + alive)
            gathered.append(held.gathered)
            reduced.append(held.reduced)
        unsharded.append(schedule.held.gathered + schedule.held.unsharded)
    return Estimate(
        parameters=parameters.expression(),
        gradients=updated.expression(),
        optimizer=state.expression(),
        buffers=buffers.expression(),
        batch=inputs.expression(),
        activations=activations.expression(),
        unsharded=maximum(unsharded),
        peak=maximum(peaks),
        reserved=maximum(computing) + maximum(gathered) + maximum(reduced),
        all_gathers=sympy.Integer(len(schedule.gathers)),
        reduce_scatters=sympy.Integer(len(schedule.reductions)),
        gathered=(N - 1) * total(schedule.gathers).expression(),
        reduced=(N - 1) * total(schedule.reductions).expression(),
        received=received.expression(),
        all_reduced=sympy.Rational(2 * (replicas - 1), replicas) * total(schedule.reductions).expression(),
    )


def largest(estimates: Sequence[Estimate]) -> Estimate:
    """The most that any of the estimates has, of each amount; of a maximum all operands."""
    if len(estimates) == 1:
        return estimates[0]

    def most(name: str) -> sympy.Expr:
        formulas = [getattr(each, name) for each in estimates]
        operands = [each.args if isinstance(each, sympy.Max) else (each,) for each in formulas]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(operands)))
        return sympy.Max(*distinct, evaluate=False) if len(distinct) > 1 else distinct[0]

    return Estimate(**{each.name: most(each.name) for each in fields(Estimate)})


def _between_rounds(marks: Sequence[Mark]) -> list[Mark]:
    """What happens in the round that a pipeline repeats; nothing without one."""
    bounds = [index for index, mark in enumerate(marks) if mark.point is Point.ROUND]
    return list(marks[bounds[0] + 1 : bounds[1]]) if bounds else []


def _merge(traces: list[Trace], fit: Fit) -> Iterator[tuple[Mark | None, Amount]]:
    """Merge the events of all traces: bytes alive become polynomials, and only the largest ones between marks stay.

    Raises:
        EstimateError: the traces differ in their operations.
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
