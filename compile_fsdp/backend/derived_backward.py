"""The backward that AOTAutograd derives of a forward graph, where compiled autograd takes it over as a graph.

AOTAutograd's cache stores a forward only together with its compiled backward, although nobody runs this one: here is
what stands for it. The graph is stored as well, as Python code, which is run on proxies to get the graph back. Ops
that take no tensor, `full` or `rand`, would be computed while the code runs, once for all steps: see `GraphTracer`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from compile_fsdp.passes.cache_key import cache_key
from compile_fsdp.passes.partitioned.offload_saved import offload_saved
from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.dynamo import set_tracer
from compile_fsdp.torch_compat.inductor import (
    CustomPartitionerFn,
    copy_cache_key,
    inductor_output_type,
    min_cut_partition,
)

_OutputCode: Any = inductor_output_type()


class GraphTracer(fx.Tracer):
    """Gets a graph back from its own code, with one node for each op."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _TraceEveryOp(self):
            return super().trace(root, concrete_args)


class _TraceEveryOp(TorchFunctionMode):
    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, OpOverload):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Partitioner(CustomPartitionerFn):
    """Inductor's own partitioner, or the user's, with a backward that can be stored.

    Args:
        chosen: The user's.
        decided: What marks on the graph's nodes stand for. Marks are no part of the key of AOTAutograd's cache.
    """

    def __init__(self, chosen: CustomPartitionerFn | None = None, decided: Sequence[object] = ()) -> None:
        self.chosen = chosen
        self.decided = decided

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.chosen or min_cut_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        if offload_saved(forward.graph, backward.graph, kwargs["num_fwd_outputs"]):
            forward.recompile()
            backward.recompile()
        set_tracer(backward, GraphTracer)
        return forward, backward

    def uuid(self) -> Any:
        if self.chosen is None:
            return cache_key(*self.decided)
        chosen = self.chosen.uuid()
        return None if chosen is None else cache_key(chosen, *self.decided)  # None: graphs are not to be cached


class UnusedBackward(_OutputCode):  # type: ignore[misc]
    """A compiled graph that cannot be run."""

    _boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        raise NotImplementedError("expected the backward of a sharded model to run under compiled autograd")

    def prepare_for_serialization(self) -> None:
        pass

    def post_compile(self, *args: Any) -> None:
        pass

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


class ForwardCompiler:
    """Inductor's inner compiler for one forward graph, without work on the backward that is derived of it.

    Attributes:
        compile_inner: Inductor's own.
        forward: The compiled forward, once there is one.
    """

    def __init__(self, compile_inner: Callable[..., Any]) -> None:
        self.compile_inner = compile_inner
        self.forward: Any = None

    def __call__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            self.forward = self.compile_inner(gm, *args, **kwargs)
            return self.forward
        unused = UnusedBackward()
        if all(map(_is_known, gm.graph.nodes)):
            # AOTAutograd's cache refers to both halves by their keys in Inductor's cache, and loads both. The forward
            # is there, and loaded already; without a key nothing is stored.
            copy_cache_key(self.forward, unused)
        return unused


def _is_known(node: fx.Node) -> bool:
    if node.op == "call_function":
        return isinstance(node.target, OpOverload) or node.target in _PLAIN
    return node.op in ("placeholder", "get_attr", "output")


# Of a graph from its code `GraphTracer` tells apart only ops and what is computed with sizes, which are proxies there.
_PLAIN = (
    operator.getitem,
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    torch.sym_max,
    torch.sym_min,
)
