"""The backward that AOTAutograd derives from a forward graph, for compiled autograd.

Compiled autograd takes this backward over as a graph. AOTAutograd's cache stores a forward only together with its
compiled backward, although nobody runs the compiled backward: `UnusedBackward` stands for it. The backward graph is
stored too, as Python code, which is run on proxies to rebuild the graph. `GraphTracer` records ops without tensor
arguments, such as `full` and `rand`. Otherwise the code would compute them once, for all steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from compile_fsdp.passes.cache_key import cache_key
from compile_fsdp.passes.partitioned.drop_random_states import reads_random_state, saves_random_state
from compile_fsdp.passes.partitioned.offload_saved import offload_saved
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator, OpOverload
from compile_fsdp.torch_compat.inductor import CustomPartitionerFn, copy_cache_key, min_cut_partition, output_code

_OutputCode: Any = output_code.value

# Settings of AOTAutograd for a backward that compiled autograd takes over, or that a block calls.
DERIVED_BACKWARD: dict[str, Any] = {
    # A saved view of an unsharded parameter would keep its storage alive, or read it after it was freed.
    "recompute_views": True,
    # An op that a checkpoint runs again gets the state of the random numbers as a saved tensor. On a GPU it would be a
    # generator, which only AOTAutograd's own backward gets.
    "graphsafe_rng_functionalization": False,
    # As in eager FSDP2, autocast around the forward casts nothing in the backward.
    "backward_pass_autocast": "off",
}


class GraphTracer(fx.Tracer):
    """Rebuilds a graph from its code, with one node for each op."""

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
        if isinstance(func, (OpOverload, HigherOrderOperator)):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Partitioner(CustomPartitionerFn):
    """Inductor's partitioner, or the user's `chosen` one, with a backward that can be stored."""

    def __init__(self, chosen: CustomPartitionerFn | None = None, decided: Sequence[object] = ()) -> None:
        self.chosen = chosen
        # Values of the marks on the graph's nodes, for `uuid`, because AOTAutograd's cache key ignores marks.
        self.decided = decided

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.chosen or min_cut_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        if offload_saved(forward.graph, backward.graph, kwargs["num_fwd_outputs"]):
            forward.recompile()
            backward.recompile()
        backward._tracer_cls = GraphTracer
        return forward, backward

    def uuid(self) -> Any:
        if self.chosen is None:
            return cache_key(*self.decided)
        chosen = self.chosen.uuid()
        return None if chosen is None else cache_key(chosen, *self.decided)  # None turns caching off


class PlainOutputCode(_OutputCode):  # type: ignore[misc]
    """Stands for a compiled graph of Inductor: what AOTAutograd and its cache call besides the graph does nothing."""

    _boxed_call = True

    def post_compile(self, *args: Any) -> None:
        pass

    prepare_for_serialization = set_triton_bundle = post_compile


class UnusedBackward(PlainOutputCode):
    """A compiled backward that raises if it runs."""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        raise NotImplementedError("expected the backward of a sharded model to run under compiled autograd")


class ForwardCompiler:
    """Inductor's inner compiler for one forward graph, without its derived backward."""

    def __init__(self, compile_inner: Callable[..., Any]) -> None:
        self.compile_inner = compile_inner
        self.forward: Any = None  # until it is compiled

    def __call__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            self.forward = self.compile_inner(gm, *args, **kwargs)
            return self.forward
        unused = UnusedBackward()
        if all(map(can_be_rebuilt, gm.graph.nodes)):
            # AOTAutograd's cache refers to both halves by their keys in Inductor's cache, and loads both. The backward
            # gets the key of the forward, because that entry exists and is loaded already. Without a key nothing is
            # stored.
            copy_cache_key(self.forward, unused)
        return unused


def can_be_rebuilt(node: fx.Node) -> bool:
    """Return whether `GraphTracer` rebuilds a node from its code."""
    if node.op == "call_function":
        if saves_random_state(node) or reads_random_state(node):
            return True
        return isinstance(node.target, OpOverload) or node.target in _PLAIN
    return node.op in ("placeholder", "get_attr", "output")


# Functions beside ops: access to items, and computations with sizes, which are proxies.
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
