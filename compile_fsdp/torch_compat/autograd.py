"""torch.autograd and compiled autograd: the running backward, version counters, saved-tensor hooks, the profiler."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch.autograd.graph import GradientEdge

from compile_fsdp.torch_compat.declarations import Late, needs, needs_attributes
from compile_fsdp.torch_compat.global_state import is_forced_eager

# Hooks, the version counter of in-place writes, a view's base, and a function that takes an equal view of a tensor
# like the base, with a gradient. (2.11.0 to 2.15.0)
needs_attributes(torch.Tensor, "_backward_hooks", "_base", "_post_accumulate_grad_hooks", "_version", "_view_func")

# The BackwardState of an AOTAutograd graph: its autograd node holds the hooks for the backward. (2.11.0, 2.13.0)
needs_attributes(torch._C._FunctionBase, "_compiled_autograd_backward_state")

# The function that switches autograd on and off in a graph. (2.13.0)
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

# Context manager: in-place writes inside do not bump the tensors' version counters. (2.13.0)
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

# Context manager: ops inside skip autograd, which for functional collectives is Python code. (2.11.0, 2.13.0)
BelowAutograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd

# Whether a profiler is on in this thread. (2.13.0)
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Whether the running backward was called with retain_graph=True. (2.13.0)
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# Run a function when the running backward ends. (2.13.0)
after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Compiled autograd's nodes, and the function that it calls for a kind of autograd node. (2.13.0)
_Op = _compiled_autograd.Op
compiled_autograd_function: Callable[[str], Callable[..., Any]] = _compiled_autograd.ops.get

_trace_wrapped = Late("torch._dynamo._trace_wrapped_higher_order_op.trace_wrapped")
_call_module_hooks = Late("torch._dynamo.external_utils.call_module_hooks_from_backward_state")


def get_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The tensors' version counters, by which autograd detects in-place writes. (2.13.0)"""
    return [tensor._version for tensor in tensors]


@needs("torch._C._autograd._unsafe_set_version_counter")
def set_versions(tensors: Sequence[torch.Tensor], versions: list[int]) -> None:
    """Reset the tensors' version counters to earlier values. (2.13.0)"""
    if get_versions(tensors) != versions:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


@needs("torch._C._current_graph_task_id")
def current_backward() -> int | None:
    """The number of this thread's running backward; None outside a backward. (2.13.0)"""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def is_compiled_node(node: Any) -> bool:
    """Whether an autograd node belongs to a graph that AOTAutograd compiled. (2.13.0)"""
    return hasattr(node, "maybe_clear_saved_tensors") and hasattr(node, "_compiled_autograd_key")


def drop_saved_tensors(node: Any) -> None:
    """Release the saved tensors of a compiled graph's autograd node; call inside a backward. (2.13.0)"""
    node.maybe_clear_saved_tensors()


@contextlib.contextmanager
def kept_hooks(outputs: Sequence[GradientEdge]) -> Iterator[None]:
    """Keep the hooks on the intermediates of the forward graph with these outputs for the next backward. (2.13.0)

    Compiled autograd takes the hooks from the nodes of AOTAutograd's graphs even if the autograd graph is retained.
    """
    found: list[Any] = [output.node for output in outputs]
    hooks: dict[Any, Any] = {}  # by autograd node
    while found:
        node = found.pop()
        if node is not None and node not in hooks:
            hooks[node] = getattr(node, "_compiled_autograd_backward_state", None)
            found += [following for following, _ in node.next_functions]
    try:
        yield
    finally:
        for node, state in hooks.items():
            if state is not None and node._compiled_autograd_backward_state is None:
                node._compiled_autograd_backward_state = state


@needs("torch._C._will_engine_execute_node")
def will_run(node: Any) -> bool:
    """Whether the running `.backward()` executes an autograd node; False for None, a dead node. (2.13.0)"""
    return node is not None and bool(torch._C._will_engine_execute_node(node))


@needs("torch._C._storage_Use_Count")
def count_uses(tensor: torch.Tensor) -> int:
    """Count the tensors on a tensor's memory, those that autograd has saved included. (2.11.0, 2.13.0, 2.15.0)"""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@needs("torch._C._DisableTorchDispatch")
def accumulates_into(leaf: torch.Tensor) -> bool:
    """Whether the running backward accumulates a gradient into `leaf`, before or after this call. (2.13.0)

    False if no path leads to the leaf, and inside `torch.autograd.grad` and `backward(inputs=...)` without the leaf.
    The engine raises RuntimeError for a leaf that `torch.autograd.grad` captures; False then, too.
    """
    with torch._C._DisableTorchDispatch():  # finding the node takes a view, for which a subclass may read a freed leaf
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return will_run(node)
    except RuntimeError:
        return False


def asks_for(node: Any) -> bool:
    """Whether the running backward needs a gradient for an autograd node; False for None. (2.13.0)

    The backward runs the node with the gradient, or returns the gradient from `torch.autograd.grad`.
    """
    try:
        return will_run(node)
    except RuntimeError:  # see `accumulates_into`
        return True


@needs(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
)
@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[bool]:
    """Disable saved-tensor hooks; yields whether any were active. (2.13.0)"""
    hooks: list[Any] = []
    while (top := cast(Any, torch._C._autograd._top_saved_tensors_default_hooks(False))) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield bool(hooks)
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@needs("torch._dynamo.compiled_autograd._enable")
@contextlib.contextmanager
def compiled_autograd(
    compiler: Callable[[torch.fx.GraphModule], Callable[..., Any]], has_sizes: bool
) -> Iterator[None]:
    """Compile every backward that this thread starts inside. (2.13.0)

    If `has_sizes`, sizes in the captured graph are dynamic from the start; otherwise a size is static until it changes.
    """
    with contextlib.ExitStack() as stack:
        if is_forced_eager():
            # The user set the stance after the forward was compiled, and its backward must be compiled, too.
            stack.enter_context(torch.compiler.set_stance("default"))
        stack.enter_context(_compiled_autograd._enable(compiler, dynamic=has_sizes))
        yield


@needs("torch._inductor.cudagraph_trees")
def prepare_compiled_autograd() -> None:
    """Import, before any backward, the module that compiled autograd imports on CUDA. (2.11.0 on an H200; 2.13.0)

    In torch 2.11, no longer in 2.13, that module stores two objects in torch's thread-local state without taking
    references. If the import happens inside a backward, the end of the backward drops that state and frees the objects
    while the module still uses them. A later garbage collection then ends the process.
    """
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees  # noqa: F401


@needs("torch._dynamo.compiled_autograd.compiled_autograd_enabled")
def swap_compiled_autograd_flag(value: bool) -> bool:
    """Set whether Dynamo traces for compiled autograd, and so defers the bodies of hooks; return it before. (2.13.0)"""
    before, _compiled_autograd.compiled_autograd_enabled = _compiled_autograd.compiled_autograd_enabled, value
    return before


def autograd_function(node: torch.fx.Node) -> str | None:
    """The name of the compiled autograd function that a node calls; None if it calls something else. (2.13.0)"""
    name: str = getattr(node.target, "__name__", "")
    return name if isinstance(node.target, _Op) or name == "call_aot_bwd_prologue" else None


class AotGradients(NamedTuple):
    """Gradients that enter the AOTAutograd graph of a captured backward."""

    given: Sequence[object]  # (forward outputs,) incoming gradients; None for an output that cannot have a gradient
    read: list[torch.fx.Node]  # nodes that the graph reads as tangents, without outputs that have no gradient


def find_aot_gradients(graph: torch.fx.Graph) -> AotGradients | None:
    """Find the `AotGradients`; None unless the backward has exactly one AOTAutograd graph. (2.11.0, 2.13.0)"""
    calls = [node for node in graph.nodes if autograd_function(node) == "call_aot_bwd_prologue"]
    if len(calls) != 1:
        return None
    *_, last = arguments = calls[0].args
    # Sequences of saved values precede the gradients, which are single arguments on 2.11 and a last sequence later.
    is_one = isinstance(last, (tuple, list))
    given: Any = last if is_one else [each for each in arguments if not isinstance(each, (tuple, list))]
    read = [node for node in calls[0].users if re.fullmatch(r"aot\d+_tangents_\d+", node.name)]
    return AotGradients(given, sorted(read, key=lambda node: cast(int, node.args[1])))


def leaf_of_accumulation(node: torch.fx.Node) -> torch.fx.Node | None:
    """The leaf into which a node of a captured backward accumulates a gradient; None for other nodes. (2.13.0)"""
    if getattr(node.target, "__name__", "") not in ("call_accumulate_grad", "accumulate_grad_.default"):
        return None
    return cast(torch.fx.Node, node.args[0])


def leaf_of_hook(node: torch.fx.Node) -> torch.fx.Node | None:
    """The leaf whose post-accumulate-grad hook a node of a captured backward calls; None for other nodes. (2.13.0)"""
    return cast(torch.fx.Node, node.args[1]) if node.kwargs.get("hook_type") == "post_acc_grad_hook" else None


def is_gradient_hook(node: torch.fx.Node) -> bool:
    """Whether a node of a captured backward calls a tensor's hook; its last argument is the gradient. (2.13.0)"""
    return node.kwargs.get("hook_type") == "tensor_pre_hook"


def makes_module_hooks(node: torch.fx.Node) -> bool:
    """Whether a node makes the object that puts a module's full backward hooks on its inputs and outputs. (2.13.0)"""
    return getattr(node.target, "__name__", "") == "_in_graph_bw_hooks"


def call_with_output_gradients(make: Callable[[Any], Any], input_count: int) -> Callable[[Any], Any]:
    """Wrap a function that makes such an object: its hooks are called like pre-hooks, behind all pre-hooks. (2.13.0)

    `input_count`: number of the module's inputs, none of which has a gradient.
    """

    def make_hooks(state: Any) -> Any:
        hooks = make(state)
        (called,) = hooks.user_hooks
        facts = {name: value for name, value in called.keywords.items() if name != "fn"}
        call = partial(_trace_wrapped.value, fn=_call_hooks, input_count=input_count, **facts)
        hooks.user_hooks, hooks.user_pre_hooks = (), (*hooks.user_pre_hooks, call)
        return hooks

    return make_hooks


def _call_hooks(module: Any, output_gradients: Any, *, input_count: int, **facts: Any) -> Any:
    _call_module_hooks.value(module, (None,) * input_count, output_gradients, **facts)
    return output_gradients


def allocation_sizes(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes of each allocation, negative for each release, in a finished memory profile. (2.13.0)"""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = profile.profiler.kineto_results.events()
    return (event.nbytes() for event in events if event.name() == "[memory]")
