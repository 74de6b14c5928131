"""Which blocks of a forward graph are equal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_fsdp.ops import watch
from compile_fsdp.passes.analysis.equal_blocks import BlockCall, _describe_target, find_equal_blocks
from compile_fsdp.torch_compat.dynamo import request_recomputation
from helpers.graphs.build import GraphBuilder
from helpers.graphs.capture import capture

Block = Callable[[Tensor, Tensor], Any]
OPS = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.exp)


def find(first: Block, second: Block, x: Tensor | None = None, weight: Tensor | None = None) -> list[list[BlockCall]]:
    """Find the equal blocks of a model of two; `x` and `weight` are inputs of the second."""

    def model(end: Tensor, *inputs: Tensor) -> Any:
        left = first(*inputs[:2])
        end.add_(1)  # a write ends a block
        right = second(*inputs[2:])
        end.add_(1)
        return left, right

    return find_in(model, like(), like(), like() if x is None else x, like() if weight is None else weight)


def find_in(model: Callable[..., Any], *inputs: Tensor) -> list[list[BlockCall]]:
    """Find the equal blocks of a function, whose first argument is a tensor to write to."""
    _, graph = capture(model, torch.zeros(()), *inputs)
    return find_equal_blocks(graph)


def find_twice(
    body: Callable[[GraphBuilder, fx.Node], fx.Node], shape: Sequence[int | torch.SymInt] = (4, 4), **options: Any
) -> list[list[BlockCall]]:
    """Find the equal blocks of a graph in which a body runs twice on one input."""
    build, outputs = GraphBuilder(meta_key="example_value", **options), []
    for size in shape:
        if isinstance(size, torch.SymInt):
            build.input_like(f"size_{size}", size)
    x = build.input("x", shape)
    for _ in range(2):
        outputs.append(body(build, x))
        build.free(x)  # ends a block
    return find_equal_blocks(build.output(*outputs))


def sizes_of(found: list[list[BlockCall]]) -> list[list[int]]:
    return [[len(call.ops) for call in equals] for equals in found]


def like(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape or (4, 4), **{"requires_grad": True, **options})


def block(x: Tensor, weight: Tensor, scale: float = 2.0, last: Callable[[Tensor], Any] = torch.relu) -> Any:
    """Compute eight ops."""
    return last(((x @ weight).sin().cos().tanh().sigmoid() + x).mul(scale))


def checkpointed(x: Tensor, weight: Tensor, inner: Block = block, **options: Any) -> Tensor:
    return x + checkpoint(inner, x, weight, use_reentrant=False, **options)


def test_blocks_with_equal_ops_on_different_inputs_are_equal() -> None:
    ((one, other),) = find(block, block)
    assert len(one.ops) == len(other.ops) == 8
    assert one.outputs == one.ops[-1:]
    assert other.outputs == other.ops[-1:]
    assert {*one.tensors}.isdisjoint(other.tensors)
    assert [len(one.tensors), len(other.tensors)] == [2, 2]
    assert one.text == other.text


def test_op_overload_ends_a_block() -> None:
    ends = partial(block, last=lambda x: torch.ops.aten.relu.default(x))
    ((one, _),) = find(ends, ends)
    assert len(one.ops) == 7


def test_input_within_a_block_does_not_end_it() -> None:
    def body(build: GraphBuilder, weight: fx.Node) -> fx.Node:
        x, y = (build.input(f"{name}{len(build.graph.nodes)}", (4, 4)) for name in "xy")
        node = build.chain(x, torch.sin, torch.cos, torch.tanh)
        return build.call(torch.sigmoid, build.call(torch.add, node, y))

    assert sizes_of(find_twice(body)) == [[5, 5]]


def test_blocks_that_a_budget_marks_differently_are_variants() -> None:
    build, outputs = GraphBuilder(meta_key="example_value"), []
    for i in range(3):
        node = build.chain(build.input(f"x{i}", (4, 4)), torch.sin, torch.cos, torch.tanh)
        if i == 1:
            request_recomputation(node)
        outputs.append(build.chain(node, torch.sin, torch.cos))
        build.free(outputs[-1])
    found = find_equal_blocks(build.output(*outputs))
    assert [[call.outputs for call in equals] for equals in found] == [[outputs[:1], outputs[2:]], [outputs[1:2]]]
    (first, _), (variant,) = found
    assert first.text != variant.text


def test_sizes_of_a_block_are_inputs_of_their_own() -> None:
    def model(end: Tensor, x: Tensor, *weights: Tensor) -> list[Tensor]:
        results = []
        for weight in weights:
            results.append(block(x, weight).view(2, x.shape[0] // 2, -1))
            end.add_(1)
        return results

    x = like(6, 4, requires_grad=False)
    torch._dynamo.mark_dynamic(x, 0)
    ((one, other),) = find_in(model, x, like(), like())
    assert one.text == other.text
    assert [len(one.tensors), len(one.ops)] == [2, 9]
    assert one.sizes and all(isinstance(node.meta["example_value"], torch.SymInt) for node in one.sizes)


def test_symbols_in_the_shapes_of_a_block_are_inputs_although_no_op_takes_them() -> None:
    def model(end: Tensor, x: Tensor, *weights: Tensor) -> list[Tensor]:
        results = []
        for weight in weights:
            results.append(block(x, weight))
            end.add_(1)
        return results

    x = like(6, 4, requires_grad=False)
    torch._dynamo.mark_dynamic(x, 0)
    ((one, _),) = find_in(model, x, like(), like())
    (size,) = one.sizes
    assert str(size.meta["example_value"]) == str(one.tensors[0].meta["example_value"].shape[0])


@pytest.mark.parametrize("reads", [True, False])
def test_fills_frees_and_hook_points_do_not_read_a_weight(reads: bool) -> None:
    build, outputs = GraphBuilder(meta_key="example_value"), []
    weights = [build.input(f"weight_{i}", (4, 4), requires_grad=True) for i in range(2)]
    x, value = build.input("x", (4, 4)), build.input("value", (4, 4), requires_grad=True)
    for weight in weights:
        build.fill(weight, value)
        build.call_opaque(watch, weight, 0)
        node = build.call(torch.add, build.call(torch.rms_norm, weight, [4]), x)
        outputs.append(build.chain(node, torch.sin, torch.cos, torch.tanh))
        build.free(weight)
        outputs += [build.call(torch.exp, weight)] if reads else []
    assert len(find_equal_blocks(build.output(*outputs))) == (not reads)


def test_texts_of_functions_differ_and_name_no_address() -> None:
    functional = torch.nn.functional
    pools = [functional.max_pool2d, functional.adaptive_max_pool2d]
    functions = ["relu", torch.relu, torch.Tensor.relu, functional.relu, operator.add, operator.mul, torch.add, *pools]
    texts = [*map(_describe_target, functions)]
    assert len({*texts}) == len(functions)
    assert not any("0x" in text or "None" in text for text in texts)


def test_function_without_a_name_ends_a_block() -> None:
    class Function:
        __module__ = "torch"

        def __init__(self) -> None:
            self.__name__ = "function"

        def __call__(self, x: Tensor) -> Tensor:
            return x.sin()

    unnamed = Function()
    assert sizes_of(find_twice(lambda build, x: build.chain(x, *OPS, unnamed))) == [[5, 5]]


@pytest.mark.parametrize(
    "other",
    [
        partial(block, scale=3.0),
        partial(block, scale=2),
        partial(block, last=torch.abs),
        partial(block, last=lambda x: x.relu()),
        partial(block, last=lambda x: torch.relu(x).detach()),
        lambda x, weight: block(x, x),
        lambda x, weight: block(x, weight, scale=weight[0, 0]),
        lambda x, weight: block(x, weight) + 1,
        lambda x, weight: block(x, weight, last=lambda y: torch.relu(y).add(1).add_(1)),
    ],
    ids=["constant", "type of a constant", "op", "method", "history", "wiring", "tensor", "length", "write"],
)
def test_blocks_that_compute_differently_are_not_equal(other: Block) -> None:
    assert find(block, other) == []


def in_checkpoint(inner: Block) -> Block:
    return lambda x, weight: checkpointed(x, weight, inner)


@pytest.mark.parametrize("outer", [lambda inner: inner, in_checkpoint], ids=["", "in a checkpoint"])
def test_texts_of_blocks_with_different_ops_differ(outer: Callable[[Block], Block]) -> None:
    texts = []
    for last in (torch.relu, torch.abs):
        same = outer(partial(block, last=last))
        ((one, _),) = find(same, same)
        texts.append(one.text)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "weight",
    [
        like(dtype=torch.float64),
        like().detach().t().requires_grad_(),
        like(requires_grad=False),
        like(5, 4),
        torch.nn.Buffer(torch.ones(4, 4)),
    ],
    ids=["dtype", "strides", "gradient", "shape", "buffer"],
)
def test_blocks_with_different_kinds_of_inputs_are_not_equal(weight: Tensor) -> None:
    def same(x: Tensor, weight: Tensor) -> Tensor:
        return block(x.sum() * x, weight.sum() * x)

    assert len(find(same, same)) == 1
    assert find(same, same, like(), weight) == []


@pytest.mark.parametrize(
    ("read", "needs_gradient", "count"),
    [
        (torch.tanh, True, 2),
        (lambda shared: shared * torch.ones(4), True, 2),
        (lambda shared: shared * shared, True, 0),
        (lambda shared: shared.sin() + shared.cos(), True, 0),
        (lambda shared: torch.rms_norm(shared, (4,)), True, 0),
        (lambda shared: (same := shared.float()).sin() + same.cos(), True, 0),
        (lambda shared: torch.rms_norm(shared, (4,)), False, 2),
    ],
    ids=["one op", "one operand", "both operands", "two ops", "op of several", "conversion to itself", "no gradient"],
)
def test_gradients_of_an_input_of_several_blocks_are_added_one_by_one(
    read: Callable[[Tensor], Tensor], needs_gradient: bool, count: int
) -> None:
    def model(end: Tensor, x: Tensor, first: Tensor, second: Tensor, shared: Tensor) -> Tensor:
        for weight in (first, second):
            x = block(x, weight) + read(shared)
            end.add_(1)
        return x

    found = find_in(model, like(), like(), like(), like(requires_grad=needs_gradient))
    assert sum(map(len, found)) == count


@pytest.mark.parametrize("is_read_behind", [True, False])
def test_block_that_makes_or_reads_a_tuple_alone_is_no_call(is_read_behind: bool) -> None:
    def body(build: GraphBuilder, x: fx.Node) -> fx.Node:
        both = build.call(torch.max, build.chain(x, *OPS) if is_read_behind else x, 0)
        build.free(x)
        item = build.call(operator.getitem, both, 0)
        return item if is_read_behind else build.chain(item, *OPS)

    assert find_twice(body) == []


def test_size_of_a_result_ends_a_block() -> None:
    def body(build: GraphBuilder, x: fx.Node) -> fx.Node:
        node = build.chain(x, *OPS)
        return build.call(operator.mul, build.call(torch.relu, node), build.call_method("size", node, 0))

    shape_env, source = ShapeEnv(), ConstantSource("rows")
    rows = shape_env.create_symintnode(shape_env.create_symbol(6, source), hint=6, source=source)
    assert sizes_of(find_twice(body, (rows, 4), fake_mode=FakeTensorMode(shape_env=shape_env))) == [[6, 6]]


def _cast(*regions: tuple[torch.dtype, bool], read_twice: bool = False) -> Block:
    """Return a block in regions of autocast, the outermost first; `read_twice`: whether two ops read its weight."""

    def run(x: Tensor, weight: Tensor) -> Any:
        result = torch.relu((x @ weight).sin().cos().tanh().sigmoid())
        return result @ weight if read_twice else result

    for dtype, enabled in reversed(regions):
        run = partial(_in_region, run, torch.autocast("cpu", dtype, enabled=enabled))
    return run


def _in_region(run: Block, region: Any, x: Tensor, weight: Tensor) -> Any:
    with region:
        return run(x, weight)


_BFLOAT16, _OFF = (torch.bfloat16, True), (torch.bfloat16, False)


@pytest.mark.parametrize("regions", [[_BFLOAT16], [_OFF], [_BFLOAT16, _OFF], [_BFLOAT16, _OFF, _BFLOAT16]])
def test_blocks_in_equal_regions_of_autocast_are_equal(regions: list[Any]) -> None:
    ((one, other),) = find(_cast(*regions), _cast(*regions))
    assert one.text == other.text
    assert [node.args[1:3] for node in one.regions] == regions


@pytest.mark.parametrize("regions", [[], [_OFF], [(torch.float16, True)], [_BFLOAT16, _OFF], [_BFLOAT16, _BFLOAT16]])
def test_blocks_in_different_regions_of_autocast_are_not_equal(regions: list[Any]) -> None:
    assert find(_cast(_BFLOAT16), _cast(*regions)) == []


def test_block_whose_parameter_autocast_casts_for_several_ops_stays() -> None:
    same = partial(_cast, read_twice=True)
    assert len(find(same(), same())) == 1
    assert find(same(_BFLOAT16), same(_BFLOAT16)) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert find(same(), same()) == []


def test_checkpoint_with_equal_bodies_belongs_to_a_block() -> None:
    ((one, other),) = find(checkpointed, checkpointed)
    assert [node.op for node in one.ops[:2]] == ["get_attr", "call_function"]
    assert one.ops[0].target != other.ops[0].target
    assert one.text == other.text
    assert len(one.tensors) == 2


def test_checkpoint_within_a_checkpoint_belongs_to_a_block() -> None:
    nested = partial(checkpointed, inner=checkpointed)
    assert len(find(nested, nested)) == 1
    assert find(nested, partial(checkpointed, inner=partial(checkpointed, inner=partial(block, scale=3.0)))) == []


@pytest.mark.parametrize(
    "other",
    [
        partial(checkpointed, inner=partial(block, scale=3.0)),
        partial(checkpointed, inner=partial(block, last=torch.abs)),
        partial(checkpointed, inner=lambda x, weight: block(x, weight, last=torch.relu) + 1),
        partial(checkpointed, inner=lambda x, weight: block(weight, x)),
        partial(checkpointed, determinism_check="none"),
        lambda x, weight: x + block(x, weight),
    ],
    ids=["constant", "op", "length", "wiring", "option", "no checkpoint"],
)
def test_blocks_with_different_checkpoints_are_not_equal(other: Block) -> None:
    assert find(checkpointed, other) == []


def _with_write(x: Tensor, weight: Tensor) -> Tensor:
    return block(x, weight, last=lambda y: torch.relu(y).add(1).add_(1))


def _without_autograd(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = weight.sum()
    return block(x, weight) * scale


def _with_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x, weight)


def _in_inference_mode(x: Tensor, weight: Tensor) -> Any:
    with torch.inference_mode():
        return block(x.detach(), weight.detach())


def _deterministic(x: Tensor, weight: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    result: Tensor = block(x, weight)
    torch.use_deterministic_algorithms(False)
    return result


@pytest.mark.parametrize(
    "same",
    [
        lambda x, weight: (x @ weight).relu(),
        lambda x, weight: ((y := block(x, weight)), y.exp()),
        lambda x, weight: ((y := block(x, weight)), y.detach().view(16)),
        lambda x, weight: (block(x, weight), x.detach().view(16)),
        torch.no_grad()(block),
        _in_inference_mode,
        _deterministic,
        lambda x, weight: block(torch.vmap(torch.sin)(x), weight),
        partial(checkpointed, inner=torch.matmul),  # with the checkpoint, its item and the sum, 4 ops
        partial(checkpointed, inner=_with_write),
        partial(checkpointed, inner=_without_autograd),
        partial(checkpointed, inner=_with_autocast),
    ],
    ids=[
        *("few ops", "two outputs that need gradients", "view of its result", "view of its input", "without autograd"),
        *("inference mode", "deterministic algorithms", "vmap", "checkpoint of few ops", "checkpoint that writes"),
        *("checkpoint that computes without autograd", "checkpoint with autocast"),
    ],
)
def test_block_is_no_call(same: Block) -> None:
    assert find(same, same) == []


def test_block_with_two_outputs_of_which_one_needs_a_gradient_is_a_call() -> None:
    def same(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (hidden := block(x, weight)), hidden.detach().exp()

    assert len(find(same, same)) == 1


def _saves(*ops: Any) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, [*ops])


def test_checkpoints_of_equal_blocks_select_equally_what_they_save() -> None:
    aten = torch.ops.aten
    mm, other = _saves(aten.mm.default), _saves(aten.mm.default, aten.sin.default)
    same = partial(checkpointed, context_fn=mm)
    assert len(find(same, partial(checkpointed, context_fn=_saves(aten.mm.default)))) == 1
    assert find(same, partial(checkpointed, context_fn=other)) == []
    assert find(same, checkpointed) == []
    counts = {"mm": 0}

    def counted() -> Any:
        counts["mm"] += 1
        return mm()

    unknown = partial(checkpointed, context_fn=counted)
    assert find(unknown, unknown) == []


def test_ops_of_a_body_count_as_those_of_the_block() -> None:
    small = partial(checkpointed, inner=lambda x, weight: (x @ weight).relu())
    assert len(find(small, small)) == 1
