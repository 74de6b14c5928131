"""`compile_fsdp::call_block`: a call of a block's forward or backward, which is compiled once for all equal blocks.

[Note: Blocks by name]
A graph calls a block by a name that hashes the block's ops. So equal graphs call equal blocks, in every process and
from every cache. The table of names holds its blocks weakly: the step that calls a block keeps it. A block that is
loaded while an equal one is in use is that one, unless its sizes may change.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from compile_fsdp.torch_compat.inductor import load_graph

_LIBRARY = torch.library.Library("compile_fsdp", "FRAGMENT")

_op_by_op = False


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a block that is compiled by itself: the forward, or a part of the backward."""

    # The compiled graph. It takes its sizes and then its tensors as one list, and empties the list. None if the ops run
    # one by one.
    run: Callable[[list[Any]], Sequence[Tensor]] | None
    name: str
    graph: fx.GraphModule  # the ops that it computes, without fake values
    work: tuple[tuple[int, int], ...]  # by op, as `work_of` in `passes/analysis/costs.py` returns it
    results: tuple[tuple[Any, ...], ...] | None  # shape, strides, dtype and device of each; None if sizes may change
    is_random: bool = False  # whether it draws random numbers
    stored: Callable[[], Any] | None = None  # returns `run` in a storable form; None without such a form

    def __post_init__(self) -> None:
        _parts[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        stored = None if self.stored is None else self.stored()
        if stored is None and self.run is not None:
            raise pickle.PicklingError(f"expected block {self.name} in a storable form, got none")
        facts = self.name, self.graph, self.work, self.results, self.is_random
        return _load_part, (None if stored is None else pickle.dumps(stored), *facts)

    def call(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        op = call_random_block if self.is_random else call_block
        results: list[Tensor] = op(list(tensors), list(sizes), self.name)
        return results


@dataclass(frozen=True, slots=True)
class Signature:
    """What a block's backward takes and returns."""

    differentiable: tuple[bool, ...]  # by output of the forward: whether it has a gradient
    saved: tuple[int, ...]  # positions among the forward's tensors, and behind them among its results
    strides: tuple[tuple[int, ...] | None, ...]  # of the output gradients; None for contiguous ones
    gradients: tuple[int, ...]  # positions of the forward's tensors whose gradients are returned, in this order


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a block, in parts that run one after the other.

    Positions count the tensors that the backward takes, and behind them the results of the parts.
    """

    parts: tuple[tuple[Part, tuple[int, ...]], ...]  # each part with the positions of its tensors
    results: tuple[int, ...]  # positions of the backward's results

    def call(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        values = [*tensors]
        for part, inputs in self.parts:
            values += part.call([values[i] for i in inputs], sizes)
        return [values[i] for i in self.results]


@dataclass(frozen=True, eq=False)
class Block:
    """A block as autograd sees it; without a backward, it has only its forward, and no signature."""

    forward: Part
    backward: Backward = Backward((), ())
    signature: Signature | None = None
    draws: tuple[Part, ...] = ()  # random ops that the forward calls by name, and a checkpoint runs again
    # Takes what the forward takes, and returns the sizes that the backward takes; None if it takes none.
    sizes: fx.GraphModule | None = None

    def __post_init__(self) -> None:
        _blocks[self.forward.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_block, (self.forward, self.backward, self.signature, self.draws, self.sizes)


def _load_block(forward: Part, *others: Any) -> Block:
    known = _blocks.get(forward.name)
    return known if known is not None and known.forward is forward else Block(forward, *others)


def _load_part(run: bytes | None, name: str, graph: fx.GraphModule, work: Any, results: Any, is_random: bool) -> Part:
    if results is not None and (known := _parts.get(name)) is not None:
        return known
    if run is None:
        return Part(None, name, graph, work, results, is_random)
    stored = partial(pickle.loads, run)
    return Part(load_graph(stored()), name, graph, work, results, is_random, stored)


_parts: WeakValueDictionary[str, Part] = WeakValueDictionary()
_blocks: WeakValueDictionary[str, Block] = WeakValueDictionary()


def find_part(name: str) -> Part:
    return _parts[name]


def find_block(name: str) -> Block | None:
    """Return the block whose forward has this name."""
    return _blocks.get(name)


def run_block(name: str, size_count: int, *values: Any) -> tuple[Tensor, ...]:
    """Call a block in a Dynamo graph: `values` are its sizes and then its tensors."""
    block = _blocks[name]
    sizes, tensors = values[:size_count], values[size_count:]
    if block.signature is None:
        return tuple(block.forward.call(tensors, sizes))
    results: tuple[Tensor, ...] = _Differentiable.apply(block, sizes, *tensors)  # type: ignore[no-untyped-call]
    return results


def run_part(inputs: list[Any], sizes: Sequence[int], name: str) -> list[Tensor]:
    """Run a part on inputs that the caller hands over: the list is emptied as the part reads them."""
    part = _parts[name]
    inputs[:0] = sizes
    return list(part.graph(*inputs) if _op_by_op or part.run is None else part.run(inputs))


@contextmanager
def op_by_op() -> Iterator[None]:
    """Run blocks op by op inside the context."""
    global _op_by_op
    outer, _op_by_op = _op_by_op, True
    try:
        yield
    finally:
        _op_by_op = outer


def _call_block(inputs: list[Tensor], sizes: list[int], part: str) -> list[Tensor]:
    return run_part([*inputs], sizes, part)


def _fake_call_block(inputs: list[Tensor], sizes: list[Any], part: str) -> list[Tensor]:
    found = _parts[part]
    layouts = found.results
    if layouts is None:
        # Not these results themselves: a state of random numbers is a tensor with data here, too.
        results = found.graph(*sizes, *inputs)
        layouts = tuple((each.shape, each.stride(), each.dtype, each.device) for each in results)
    return [torch.empty_strided(*layout, dtype=dtype, device=device) for *layout, dtype, device in layouts]


for _name, _tags in (("call_block", ()), ("call_random_block", (torch.Tag.nondeterministic_seeded,))):
    _schema = f"{_name}(Tensor[] inputs, SymInt[] sizes, str part) -> Tensor[]"
    _LIBRARY.define(_schema, tags=(torch.Tag.needs_exact_strides, *_tags))
    _LIBRARY.impl(_name, _call_block, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compile_fsdp::{_name}", _fake_call_block, lib=_LIBRARY)

call_block = torch.ops.compile_fsdp.call_block.default
call_random_block = torch.ops.compile_fsdp.call_random_block.default
BLOCK_CALLS = (call_block, call_random_block)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Block, sizes: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        signature = block.signature
        assert signature is not None
        results = block.forward.call(tensors, sizes)
        every = [*tensors, *results]
        outputs = tuple(results[: len(signature.differentiable)])
        ctx.save_for_backward(*(every[i] for i in signature.saved))
        ctx.block, ctx.sizes = block, () if block.sizes is None else block.sizes(*sizes, *tensors)
        pairs = zip(outputs, signature.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_gradient in pairs if not has_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        block: Block = ctx.block
        signature = block.signature
        assert signature is not None
        pairs = zip(grads, signature.differentiable, strict=True)
        own = [grad for grad, has_gradient in pairs if has_gradient]
        tangents = [_restride(grad, strides) for grad, strides in zip(own, signature.strides, strict=True)]
        found = block.backward.call([*ctx.saved_tensors, *tangents], ctx.sizes)
        gradients = dict(zip(signature.gradients, found, strict=True))
        return (None, None, *(gradients.get(i) for i in range(len(ctx.needs_input_grad) - 2)))


def _restride(grad: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    if strides is None:
        return grad.contiguous()
    return grad if grad.stride() == strides else grad.new_empty_strided(grad.shape, strides).copy_(grad)
