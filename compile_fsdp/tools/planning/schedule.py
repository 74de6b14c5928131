"""The memory that eager FSDP2 holds at each point of a step: gathers, unsharded parameters, reductions.

[Note: Who holds a gather's buffer]
In the forward, the buffer of a gather lives until the next group's buffer is copied out, so that copying out of one may
overlap with gathering the next; in the backward, until its own copy-out. torch 2.13 drops its reference to the former
buffer before that copy-out, but still has it in a local variable. A reduce-scatter input lives until the next
reduce-scatter begins; with torch 2.12, since a local variable holds it, until that one is over.

[Note: Streams do not share memory]
On a GPU, FSDP2 allocates gather buffers in the stream that copies shards into them, and reduced gradients in that of
reduce-scatters. CUDA's caching allocator keeps what is freed for the stream that allocated it, so that none of the
three streams gets the memory that another one needed at another time. The process reserves the sum of their maxima.

[Note: All-reduces keep their buffers]
With replicas (HSDP), the output of a reduce-scatter is reduced over them in place. FSDP2 refers to it until the
backward is over, so that no later reduce-scatter gets its memory while the all-reduce may still run. Where gradients
have another dtype than parameters, they are a copy beside it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from compile_fsdp.tools.planning.amounts import Amount, constant
from compile_fsdp.tools.planning.sizes import GroupSizes
from compile_fsdp.tools.planning.tracing import Mark, Point
from compile_fsdp.torch_compat.fsdp import HOLDS_REDUCE_INPUT


class Backend(enum.Enum):
    """The backend of the collectives, which decides which copies they make in torch's memory."""

    NCCL = "nccl"
    """NCCL makes no copies."""
    GLOO = "gloo"
    """gloo copies whole all-gather outputs and reduce-scatter inputs, and on CPUs gradients are copied to pad them."""
    FAKE = "fake"
    """torch's fake process group on a CPU, whose collectives do nothing; gradients are copied to pad them."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that FSDP2 holds beside the sharded parameters. See [Note: Streams do not share memory].

    Attributes:
        gathered: Buffers of all-gathers and cast shards, in the stream of all-gathers.
        unsharded: Unsharded parameters, in the stream that computes.
        inputs: Inputs of reduce-scatters, in the stream that computes.
        accumulated: Unsharded gradients of several microbatches, in the stream that computes.
        reduced: Outputs of reduce-scatters and gradients, in the stream of reduce-scatters.
    """

    gathered: Amount = field(default_factory=Amount)
    unsharded: Amount = field(default_factory=Amount)
    inputs: Amount = field(default_factory=Amount)
    accumulated: Amount = field(default_factory=Amount)
    reduced: Amount = field(default_factory=Amount)

    @property
    def computing(self) -> Amount:
        """Bytes in the stream that computes."""
        return self.unsharded + self.inputs + self.accumulated

    @property
    def total(self) -> Amount:
        return self.gathered + self.computing + self.reduced

    def plus(self, **amounts: Amount) -> Held:
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def minus(self, **amounts: Amount) -> Held:
        return replace(self, **{name: getattr(self, name) - amount for name, amount in amounts.items()})


@dataclass
class Schedule:
    """Follows what FSDP2 does and holds at each mark of a trace.

    Attributes:
        sizes: Sizes of each group of the plan.
        execution: Indices of the groups in the order in which their forwards begin.
        forward_prefetch: Number of gathers launched ahead in the forward, as by `set_modules_to_forward_prefetch`.
        backward_prefetch: Number of gathers launched ahead in the backward; FSDP2 itself launches 1.
        backend: Backend of the collectives.
        replicas: Number of sets of ranks that each hold all parameters, sharded.
        held: What FSDP2 holds now.
        gathers: Bytes that a rank sends in each all-gather so far.
        reductions: Bytes that a rank receives from each reduce-scatter so far.
    """

    sizes: Sequence[GroupSizes]
    execution: Sequence[int]
    forward_prefetch: int
    backward_prefetch: int
    backend: Backend
    replicas: int = 1
    held: Held = field(default_factory=Held)
    gathers: list[Amount] = field(default_factory=list)
    reductions: list[Amount] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffers: set[int] = set()  # groups whose gather is launched and not copied out yet
        self._unsharded: set[int] = set()
        self._former: int | None = None  # See [Note: Who holds a gather's buffer]
        self._reduce_input = Amount()
        self._former_reduce_input = Amount()  # input of the previous reduce-scatter
        self._gradients: dict[int, Amount] = {}
        self._accumulated: dict[int, Amount] = {}
        self._order: list[int] = []  # groups in the order in which their forwards end
        self._positions: dict[int, list[int]] = {}  # positions of each group in `_order`

    def advance(self, mark: Mark) -> Iterator[Held]:
        """Follow what FSDP2 does at a mark; yields what FSDP2 holds at each possible peak."""
        if mark.point is Point.PRE_FORWARD:
            yield from self._gather(mark.group)
            yield from self._copy_out(mark.group, in_forward=True)
            ahead = self.execution.index(mark.group) + 1
            for group in self.execution[ahead : ahead + self.forward_prefetch] if self.forward_prefetch else ():
                yield from self._gather(group)
        elif mark.point is Point.POST_FORWARD:
            self._positions.setdefault(mark.group, []).append(len(self._order))
            self._order.append(mark.group)
            if self.sizes[mark.group].reshard_after_forward:
                self._free(mark.group)
        elif mark.point is Point.FORWARD_END:
            self._drop_former_buffer()
        elif mark.point is Point.PRE_BACKWARD:
            yield from self._gather(mark.group)
            yield from self._copy_out(mark.group, in_forward=False)
            before = self._positions[mark.group].pop()
            for group in self._order[max(0, before - self.backward_prefetch) : before][::-1]:
                yield from self._gather(group)
        elif mark.point is Point.ACCUMULATED and mark.group not in self._accumulated:
            self._accumulated[mark.group] = constant(self.sizes[mark.group].accumulated(mark.reduced))
            self.held = self.held.plus(accumulated=self._accumulated[mark.group])
        elif mark.point is Point.POST_BACKWARD:
            yield from self._start_reduction(mark)
        elif mark.point is Point.GRADIENTS_FREED:
            self.held = self.held.minus(accumulated=self._accumulated.pop(mark.group, Amount()))
            yield from self._reduce(mark)
            self._drop_former_reduce_input()
        yield self.held

    def _gather(self, group: int) -> Iterator[Held]:
        if group in self._buffers or group in self._unsharded:
            return
        sizes = self.sizes[group]
        for temporary in sizes.casting():
            yield self.held.plus(gathered=temporary)
        self._buffers.add(group)
        self.held = self.held.plus(gathered=sizes.gathered())
        self.gathers.append(sizes.gather_input())
        workspace = sizes.gathered() if self.backend is Backend.GLOO else Amount()
        yield self.held.plus(gathered=sizes.cast() + workspace)

    def _copy_out(self, group: int, in_forward: bool) -> Iterator[Held]:
        if group not in self._buffers:
            return
        self._buffers.remove(group)
        self._unsharded.add(group)
        gathered = self.sizes[group].gathered()
        self.held = self.held.plus(unsharded=gathered)
        yield self.held
        if in_forward:
            self._drop_former_buffer()
            self._former = group
        else:
            self.held = self.held.minus(gathered=gathered)

    def _drop_former_buffer(self) -> None:
        if self._former is not None:
            self.held = self.held.minus(gathered=self.sizes[self._former].gathered())
            self._former = None

    def _free(self, group: int) -> None:
        if group in self._unsharded:
            self._unsharded.remove(group)
            self.held = self.held.minus(unsharded=self.sizes[group].gathered())

    def _start_reduction(self, mark: Mark) -> Iterator[Held]:
        self._free(mark.group)
        self._former_reduce_input = self._reduce_input
        if not HOLDS_REDUCE_INPUT:
            self._drop_former_reduce_input()
        sizes = self.sizes[mark.group]
        self._reduce_input = sizes.reduced(mark.reduced).times_ranks()
        self.held = self.held.plus(inputs=self._reduce_input)
        yield self.held.plus(
            inputs=sizes.padded_copies(mark.reduced) if self.backend is not Backend.NCCL else Amount()
        )

    def _drop_former_reduce_input(self) -> None:
        self.held = self.held.minus(inputs=self._former_reduce_input)
        self._former_reduce_input = Amount()

    def _reduce(self, mark: Mark) -> Iterator[Held]:
        if not mark.reduced:
            return
        sizes = self.sizes[mark.group]
        output, gradients = sizes.reduced(mark.reduced), sizes.shards(mark.reduced)
        self.reductions.append(output)
        workspace = self._reduce_input if self.backend is Backend.GLOO else Amount()
        yield self.held.plus(reduced=output + workspace)
        if sizes.casts_reduced(mark.reduced):
            yield self.held.plus(reduced=output + gradients)
            if self.replicas > 1:  # See [Note: All-reduces keep their buffers]
                self.held = self.held.plus(reduced=output)
        if mark.group not in self._gradients:  # otherwise they are added to the gradients of an earlier use
            self._gradients[mark.group] = gradients
            self.held = self.held.plus(reduced=gradients)
