"""Build graphs for the passes, with fake values and windows on unsharded parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_fsdp.ops import (
    all_gather_into_tensor,
    copy_,
    reduce_scatter_tensor,
    resize_storage_bytes_,
    split_with_sizes_copy,
)

aten = torch.ops.aten
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
c10d = torch.ops._c10d_functional
GATHER = c10d.all_gather_into_tensor.default
REDUCE = c10d.reduce_scatter_tensor.default

Size = int | torch.SymInt | fx.Node


class GraphBuilder:
    """A graph under construction; computes each call's value on fake tensors.

    Args:
        meta_key: "val" for a graph of AOTAutograd, "example_value" for a graph of Dynamo.
        fake_mode: Mode of the fake tensors; a subgraph shares its parent's mode.
    """

    def __init__(self, meta_key: str = "val", fake_mode: FakeTensorMode | None = None) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode or FakeTensorMode(shape_env=ShapeEnv())
        self._meta_key = meta_key
        self._root = torch.nn.Module()

    def value(self, node: fx.Node) -> Any:
        return node.meta[self._meta_key]

    def input(
        self, name: str, shape: Sequence[int | torch.SymInt], dtype: torch.dtype = torch.float32, **options: Any
    ) -> fx.Node:
        with self.fake_mode:
            return self.input_like(name, torch.empty(tuple(shape), dtype=dtype, **options))

    def input_like(self, name: str, value: object) -> fx.Node:
        """Add a placeholder with a given fake value, such as a view of an input."""
        node = self.graph.placeholder(name)
        node.meta[self._meta_key] = value
        return node

    def size(self, name: str) -> fx.Node:
        """Add a placeholder with a size of unknown value."""
        assert self.fake_mode.shape_env is not None
        return self.input_like(name, self.fake_mode.shape_env.create_unbacked_symint())

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), self.value)
        with self.fake_mode:
            value = target(*fake_args, **fake_kwargs)
        if value is not None:
            node.meta[self._meta_key] = value
        return node

    def chain(self, x: fx.Node, *targets: Callable[..., Any]) -> fx.Node:
        """Call each target on the result of the one before it."""
        for target in targets:
            x = self.call(target, x)
        return x

    def call_opaque(self, target: Callable[..., Any], *args: Any, value: object = None, **kwargs: Any) -> fx.Node:
        """Add a call with a given value, without running it; None: unknown."""
        node = self.graph.call_function(target, args, kwargs)
        if value is not None:
            node.meta[self._meta_key] = value
        return node

    def call_method(self, name: str, *args: Any) -> fx.Node:
        node = self.graph.call_method(name, args)
        fake_self, *fake_args = fx.node.map_arg(args, self.value)
        with self.fake_mode:
            node.meta[self._meta_key] = getattr(fake_self, name)(*fake_args)
        return node

    def subgraph(self, name: str, module: fx.GraphModule) -> fx.Node:
        setattr(self._root, name, module)
        return self.graph.get_attr(name)

    def attribute(self, name: str, shape: Sequence[int]) -> fx.Node:
        """Add a tensor that the graph's module holds."""
        setattr(self._root, name, torch.empty(tuple(shape)))
        node = self.graph.get_attr(name)
        with self.fake_mode:
            node.meta[self._meta_key] = torch.empty(tuple(shape))
        return node

    def resize(self, parameter: fx.Node, size_bytes: Size) -> fx.Node:
        # Not run, so the fake storage keeps its size: values in graphs do not record sizes over time.
        return self.graph.call_function(resize_storage_bytes_, (parameter, size_bytes))

    def full(self, parameter: fx.Node) -> fx.Node:
        return self.resize(parameter, self.value(parameter).untyped_storage().nbytes())

    def copy(self, parameter: fx.Node, value: fx.Node) -> fx.Node:
        return self.graph.call_function(copy_, (parameter, value))

    def fill(self, parameter: fx.Node, value: fx.Node) -> None:
        self.full(parameter)
        self.copy(parameter, value)

    def free(self, parameter: fx.Node) -> fx.Node:
        return self.resize(parameter, 0)

    def output(self, *values: fx.Node) -> fx.Graph:
        return self.output_module(*values).graph

    def output_module(self, *values: fx.Node) -> fx.GraphModule:
        output = self.graph.output(values)
        output.meta[self._meta_key] = tuple(self.value(value) for value in values)
        return fx.GraphModule(self._root, self.graph)


def one_window(dtype: torch.dtype = torch.float32) -> fx.Graph:
    """Build a graph that gathers a parameter of eight elements from two ranks and reads it once."""
    build = GraphBuilder()
    weight, shard = build.input("weight", (8,), dtype), build.input("shard", (4,), dtype)
    gathered = build.call(GATHER, shard, 2, "dp")
    build.fill(weight, build.call(c10d.wait_tensor.default, gathered))
    result = build.call(aten.relu.default, weight)
    build.free(weight)
    return build.output(result)


class Layer:
    """A (4, 4) parameter `weight`, `value` to fill it with, and `x` to multiply, in AOTAutograd's or Dynamo's graph."""

    def __init__(self, is_of_dynamo: bool = False) -> None:
        self.build = GraphBuilder("example_value" if is_of_dynamo else "val")
        self.weight, self.value, self.x = (self.build.input(name, (4, 4)) for name in ("weight", "value", "x"))
        self._is_of_dynamo = is_of_dynamo

    def add(self, steps: str) -> list[fx.Node]:
        """Call methods by name, such as "fill read free"; return the results of the reads."""
        results = [getattr(self, step)() for step in steps.split()]
        return [result for result in results if result is not None]

    def fill(self, value: fx.Node | None = None) -> None:
        self.build.fill(self.weight, value or self.value)

    def full(self) -> None:
        self.build.full(self.weight)

    def copy(self) -> None:
        self.build.copy(self.weight, self.value)

    def write(self, tensor: fx.Node | None = None) -> None:
        if self._is_of_dynamo:
            self.build.call_method("add_", tensor or self.weight, 1)
        else:
            self.build.call(aten.add_.Tensor, tensor or self.weight, 1)

    def write_value(self) -> None:
        self.write(self.value)

    def read(self) -> fx.Node:
        return self.build.call(torch.matmul if self._is_of_dynamo else aten.mm.default, self.x, self.weight)

    def free(self) -> None:
        self.build.free(self.weight)


def subgraph_with_window(build: GraphBuilder) -> fx.Node:
    """Add a subgraph of x and w; it fills w with -x, multiplies x by w, and frees w."""
    body = GraphBuilder(fake_mode=build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    body.fill(w, body.call(aten.neg.default, x))
    product = body.call(aten.mm.default, x, w)
    body.free(w)
    return build.subgraph("region", body.output_module(product))


def gather(build: GraphBuilder, shards: Sequence[fx.Node], ranks: int, group: str = "dp") -> list[fx.Node]:
    """Add the runtime's packed all-gather of 1-D `shards`; results are [ranks, numel]."""
    numels = [build.value(shard).numel() for shard in shards]
    packed = build.call(aten.cat.default, list(shards)) if len(shards) > 1 else shards[0]
    launched = build.call(GATHER, packed, ranks, group)
    waited = build.call(c10d.wait_tensor.default, launched)
    rows = build.call(aten.reshape.default, waited, [ranks, sum(numels)])
    if len(shards) == 1:
        return [rows]
    split = build.call(split_with_sizes_copy, rows, numels, 1)
    return [build.call(operator.getitem, split, i) for i in range(len(shards))]


def reduce(build: GraphBuilder, gradients: Sequence[fx.Node], ranks: int, group: str = "dp") -> list[fx.Node]:
    """Add the runtime's packed reduce-scatter; return 1-D shards of the averaged gradients."""
    rows = [build.call(aten.reshape.default, gradient, [ranks, -1]) for gradient in gradients]
    numels = [build.value(each).shape[1] for each in rows]
    packed = build.call(aten.cat.default, rows, 1)
    flat = build.call(aten.reshape.default, packed, [-1])
    launched = build.call(REDUCE, flat, "avg", ranks, group)
    waited = build.call(c10d.wait_tensor.default, launched)
    split = build.call(split_with_sizes_copy, waited, numels, 0)
    return [build.call(operator.getitem, split, i) for i in range(len(gradients))]


def name_collectives(graph: fx.Graph) -> None:
    """Replace torch's collectives by the runtime's, each with a unique name."""
    ours = {GATHER: all_gather_into_tensor, REDUCE: reduce_scatter_tensor}
    for torchs, named in ours.items():
        for node in graph.find_nodes(op="call_function", target=torchs):
            node.target, node.args = named, (*node.args, f"of {node.name}")


def checkpoint(build: GraphBuilder, x: fx.Node, weight: fx.Node, body_of: Callable[..., fx.Node]) -> fx.Node:
    """Add a checkpoint of `body_of(body, x, weight)` to a Dynamo graph."""
    body = GraphBuilder(meta_key="example_value", fake_mode=build.fake_mode)
    last = body_of(body, *(body.input_like(f"inside_{i}", build.value(each)) for i, each in enumerate((x, weight))))
    attribute = build.subgraph(f"body_{x.name}", body.output_module(last))
    return build.call_opaque(CHECKPOINT, attribute, x, weight, value=body.value(last))
