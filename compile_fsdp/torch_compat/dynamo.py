"""Dynamo, and the FX graphs that it makes: how a frame is traced, what of it a graph's nodes tell, counts and logs."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import eval_frame, exc, symbolic_convert, tensor_version_op, utils
from torch.fx.experimental import _backward_state

from compile_fsdp.torch_compat.declarations import needs, needs_attributes
from compile_fsdp.torch_compat.dispatch import OpOverload

# Dynamo re-raises ShortenTraceback and its subclasses unchanged; any other exception raised while it traces
# becomes an InternalTorchDynamoError. (2.13.0)
ShortenTraceback = exc.ShortenTraceback



def passing_dynamo(error: Exception) -> Exception:
    """An error of the same type and message that reaches the user unchanged if it is raised in a trace. (2.13.0)"""
    if isinstance(error, ShortenTraceback):
        return error
    kind: Any = type(type(error).__name__, (ShortenTraceback, type(error)), {})
    passing: Exception = kind(*error.args, first_useful_frame=None)
    return passing


# What Dynamo cannot trace, and what it will not compile once more. (2.13.0)
Unsupported = exc.Unsupported
FailOnRecompileLimitHit = exc.FailOnRecompileLimitHit

# The base of all that Dynamo raises, an op's own error in a trace, and what torch.compile(module) returns. (2.13.0)
TorchDynamoException = exc.TorchDynamoException
TorchRuntimeError = exc.TorchRuntimeError
OptimizedModule = torch._dynamo.OptimizedModule

# Whether Dynamo's guards and bytecode are what `compile_fsdp.replay` takes them for. (2.13.0, 2.15.0)
CAN_REPLAY = torch.__version__ >= "2.13"

# Frames of this code are not compiled on their own, but are still inlined into a compiled caller. (2.13.0)
skip_code = eval_frame.skip_code

# Marks a function that Dynamo calls while it traces, and whose result it takes for a constant. (2.13.0)
assume_constant_result = torch._dynamo.assume_constant_result

# call_with_side_effects(fn, *args) lets fn change objects outside of a higher-order op's body. (2.13.0)
call_with_side_effects = utils._disable_side_effect_safety_checks_for_current_subtracer

# The ops that read and set version counters in a graph; importing their module defines them. (2.13.0)
tensor_version: OpOverload = tensor_version_op._tensor_version
set_version_counter: OpOverload = tensor_version_op._unsafe_set_version_counter

# The input of a Dynamo graph that gets its hooks after the forward. (2.13.0)
_BackwardState = _backward_state.BackwardState

# Who makes a graph of a module's code again when it is read back; how a node gets another name. (2.13.0)
needs_attributes(torch.fx.GraphModule, "_tracer_cls")
needs_attributes(torch.fx.Node, "_rename")


@needs("torch._guards.TracingContext.try_get")
def tracing_context() -> object:
    """The object that stands for Dynamo's current attempt to trace a frame, None outside of one. (2.13.0)"""
    return torch._guards.TracingContext.try_get()


@needs("torch._guards.CompileContext.current_compile_id")
def current_compile_id() -> str:
    """Which frame, and which attempt at it, Dynamo compiles now. (2.13.0)"""
    return str(torch._guards.CompileContext.current_compile_id())


@needs("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")
def count_outer_tracers() -> int:
    """While Dynamo traces: how many regions, as a checkpoint's, surround the code. (2.13.0)"""
    tracer, count = symbolic_convert.InstructionTranslator.current_tx().output.current_tracer, 0
    while tracer.parent is not None:
        tracer, count = tracer.parent, count + 1
    return count


def mark_static(tensor: torch.Tensor) -> None:
    """Keep Dynamo from turning the sizes of a graph input into symbols, also while it traces. (2.13.0)

    torch._dynamo.mark_static does so only outside of a trace.
    """
    for each in (tensor, tensor._base):  # a view's sizes are found through its base
        if each is not None:
            each._dynamo_static_indices = set(range(each.dim()))  # type: ignore[attr-defined]
            each._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


@needs("torch._dynamo.maybe_mark_dynamic")
def mark_changing(tensor: torch.Tensor, dim: int) -> None:
    """Let Dynamo take a size of a graph input for changing, unless the graph needs the one it has. (2.13.0)"""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


@needs("torch._dynamo.eval_frame.check_if_dynamo_supported")
def why_dynamo_refuses() -> str | None:
    """Why Dynamo does not work with this interpreter; None if it does. (2.13.0)"""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


@needs("torch._dynamo.list_backends")
def list_backends() -> list[str]:
    """Names of the registered Dynamo backends, debugging ones included. (2.13.0)"""
    return list(torch._dynamo.list_backends(exclude_tags=()))


@needs("torch._dynamo.lookup_backend")
def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered Dynamo backend of that name. (2.13.0)"""
    return cast(Callable[..., Any], torch._dynamo.lookup_backend(name))


def compile_for_many(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    filter_guards: Callable[[Sequence[Any]], Sequence[bool]] | None,
) -> Callable[..., Any]:
    """torch.compile without graph breaks, of a function that many modules share, each with its own graph. (2.13.0)

    With a filter Dynamo looks up the object of every guard once more.
    """
    arguments: dict[str, Any] = {"fullgraph": True, "backend": backend}
    if filter_guards is not None:
        arguments["options"] = {"guard_filter_fn": filter_guards}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        arguments["recompile_limit"] = 1000
    compiled: Callable[..., Any] = torch.compile(function, **arguments)
    return compiled


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How something is compiled.

    Attributes:
        backend: Name of the Dynamo backend.
        fullgraph: Whether a graph break is an error.
    """

    backend: str
    fullgraph: bool


@needs("torch._dynamo.eval_frame._TorchDynamoContext", "torch._dynamo.eval_frame.innermost_backend")
def compile_settings(compiled: Any) -> CompileSettings | None:
    """With which settings torch.compile has made a module, or a function; None where that cannot be told. (2.13.0)"""
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and hasattr(compiled, "__closure__"):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    if not isinstance(context, eval_frame._TorchDynamoContext) or not callable(context.callback):
        return None
    backend: Any = eval_frame.innermost_backend(context.callback)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    return CompileSettings(str(name), bool(getattr(context, "fullgraph", False) or context.error_on_graph_break))


class GuardFact(NamedTuple):
    """One of Dynamo's guards.

    Attributes:
        kind: What it asks, as "TYPE_MATCH".
        name: The expression of the object that it asks; empty for torch's global state.
        argument: What it asks the object for; None for most kinds.
    """

    kind: str
    name: str
    argument: Any


def guard_facts(entries: Sequence[Any]) -> list[GuardFact]:
    """The guards of a graph, from what Dynamo hands to the option `guard_filter_fn`. (2.13.0)"""
    facts = []
    for entry in entries:
        make: Any = entry.orig_guard.create_fn
        arguments = [*getattr(make, "args", ()), *getattr(make, "keywords", {}).values()]
        facts.append(GuardFact(entry.guard_type, entry.orig_guard.name, arguments[0] if arguments else None))
    return facts


@needs("torch._dynamo.convert_frame.register_bytecode_hook")
@contextlib.contextmanager
def on_bytecode(see: Callable[[CodeType, CodeType], None]) -> Iterator[None]:
    """Within it, get the code of every frame that Dynamo compiles, and the code that it runs instead. (2.13.0)"""
    from torch._dynamo import convert_frame

    def hook(code: CodeType, new_code: CodeType) -> None:
        see(code, new_code)

    handle = convert_frame.register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def compiles_frames() -> bool:
    """Whether Dynamo looks at each frame that begins now, in this thread. (2.13.0)"""
    callback = get_eval_frame_callback()
    return callback is not None and callback is not False


@needs("torch._guards.TracingContext.get_traced_code")
def traced_code() -> list[CodeType]:
    """While Dynamo compiles a graph: the code that it has traced into it. (2.13.0)"""
    return list(torch._guards.TracingContext.get_traced_code() or ())


@needs("torch._dynamo.config.patch")
def recompile_limit(limit: int) -> contextlib.AbstractContextManager[object]:
    """Within it, Dynamo compiles the same code up to so many times. (2.13.0)"""
    return torch._dynamo.config.patch(recompile_limit=limit)  # type: ignore[no-any-return]


@needs("torch._dynamo.config.patch")
def without_side_effect_log() -> contextlib.AbstractContextManager[object]:
    """Within it, Dynamo takes no stacks for its log of side effects, unless someone reads that. (2.13.0)

    It takes and formats them for every trace: 5 % of a first step of 24 blocks (2026-11-24).
    """
    is_read = "TORCH_TRACE" in os.environ or "side_effects" in os.environ.get("TORCH_LOGS", "")
    if is_read or getattr(torch._dynamo.config, "side_effect_replay_policy", None) != "info":
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(side_effect_replay_policy="silent")  # type: ignore[no-any-return]


@needs("torch._dynamo.utils.counters")
def dynamo_counters() -> Mapping[str, MutableMapping[str, int]]:
    """What Dynamo, and what it calls, count in this process: by kind, then by what it was. (2.13.0)"""
    return cast(Mapping[str, MutableMapping[str, int]], utils.counters)


@needs("torch._dynamo.utils.get_compilation_metrics")
def last_compilations() -> list[Any]:
    """What Dynamo records of each compilation of a frame; it keeps the last 64. (2.13.0)"""
    return list(utils.get_compilation_metrics())


@needs("torch._logging.getArtifactLogger")
def graph_break_logger() -> logging.Logger:
    """Where Dynamo says of each graph break, at level DEBUG, in which line of whose code it is and why. (2.13.0)"""
    return torch._logging.getArtifactLogger(  # type: ignore[attr-defined]
        "torch._dynamo.symbolic_convert", "graph_breaks"
    )


@needs("torch._logging._internal.trace_structured")
def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to torch's structured trace (TORCH_TRACE), if one is recorded. (2.13.0)"""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=False,
    )


def copy_dynamo_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a Dynamo graph with what AOTAutograd reads of it: metadata, attributes, sources of inputs. (2.13.0)"""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda each: copies[each])
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    copied = torch.fx.GraphModule(gm, graph)
    for name, value in vars(gm).items():
        if name not in vars(copied):
            setattr(copied, name, value)
    copied.meta = dict(gm.meta)
    return copied


def set_tracer(gm: torch.fx.GraphModule, tracer: type[torch.fx.Tracer]) -> None:
    """Choose who makes a graph of the module's code again when it is read back. (2.13.0)"""
    gm._tracer_cls = tracer


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a node another name, which must be free. (2.13.0)"""
    node._rename(name)


def ban_recomputation(node: torch.fx.Node) -> None:
    """Keep AOTAutograd's partitioner from computing a node of a Dynamo graph again in the backward. (2.13.0)"""
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def request_recomputation(node: torch.fx.Node) -> None:
    """Let AOTAutograd's partitioner compute a node of a Dynamo graph again in the backward. (2.13.0)

    The number of its checkpoint is that of none of the user's, which are counted from 1 on.
    """
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 0


def is_recomputation_settled(node: torch.fx.Node) -> bool:
    """Whether a checkpoint of the user's says if a node of a Dynamo graph is to be computed again. (2.13.0)"""
    return "recompute" in node.meta


# Where torch keeps what users annotate nodes with; AOTAutograd copies it to what it makes of them. (2.11.0, 2.13.0)
_OFFLOADED = "compile_fsdp.offloaded"


def request_offload(node: torch.fx.Node, least_bytes: int) -> None:
    """Mark what AOTAutograd makes of a node: results of so many bytes are to be offloaded. (2.13.0)"""
    node.meta["custom"] = {**node.meta.get("custom", {}), _OFFLOADED: least_bytes}


def least_offloaded_bytes(node: torch.fx.Node) -> int | None:
    """How large a result of a node of AOTAutograd's must be to be offloaded; None if it is not to be. (2.13.0)"""
    least: int | None = node.meta.get("custom", {}).get(_OFFLOADED)
    return least


def innermost_module(node: torch.fx.Node) -> str | None:
    """How Dynamo refers to the innermost module of a node of the forward: "L['self'].layers.0". (2.13.0)"""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else None


def traced_in(node: torch.fx.Node, folder: str) -> bool:
    """Whether the line that a node of a Dynamo graph stands for is in a file below a folder. (2.13.0)"""
    *_, last = re.findall(r'File "(.*?)"', node.stack_trace or "") or [""]
    return folder in last


def graph_input_example(node: torch.fx.Node) -> Any:
    """The real object behind a placeholder of a Dynamo graph, while Dynamo compiles it. (2.13.0)"""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def fake_mode_of(gm: torch.fx.GraphModule) -> Any:
    """The mode that made the fake values of a Dynamo graph; None for a graph without any. (2.13.0)"""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def release_real_tensors(fake_mode: Any) -> None:
    """Drop the weak references that a mode keeps to the tensors its fake ones stand for. (2.13.0)

    torch swaps a DTensor parameter for its converted self in `Module.to`, and cannot while somebody refers to it.
    """
    describer = fake_mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


def is_hooks_input(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a Dynamo graph is the BackwardState, which gets the hooks after the forward. (2.13.0)"""
    return isinstance(node.meta.get("example_value"), _BackwardState)


def has_hooks_input(gm: torch.fx.GraphModule) -> bool:
    """Whether a Dynamo graph gets a BackwardState. (2.13.0)"""
    return any(is_hooks_input(node) for node in gm.graph.find_nodes(op="placeholder"))


class DeferredHook(NamedTuple):
    """A call in a Dynamo graph that registers a hook from Dynamo's BackwardState on an intermediate."""

    tensor: torch.fx.Node
    name: str  # the attribute of the BackwardState


def deferred_hook(node: torch.fx.Node) -> DeferredHook | None:
    """What a node that uses a BackwardState does with it; None if it is not such a call. (2.13.0)"""
    if getattr(node.target, "__name__", "") != "_register_hook_trampoline" or len(node.args) != 2 or node.users:
        return None
    variables = inspect.getclosurevars(cast(Any, node.target)).nonlocals
    tensor = node.args[0]
    if variables.get("name") != "register_hook" or "hook_name" not in variables:
        return None
    return DeferredHook(tensor, variables["hook_name"]) if isinstance(tensor, torch.fx.Node) else None
