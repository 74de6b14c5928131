"""Dynamo and its FX graphs: traces of frames, guards, metadata of nodes, counters and logs."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import callback, convert_frame, eval_frame, exc, symbolic_convert, tensor_version_op, utils
from torch.fx.experimental import _backward_state

from compile_fsdp.torch_compat.declarations import Late, needs, needs_attributes
from compile_fsdp.torch_compat.dispatch import OpOverload

# Dynamo re-raises ShortenTraceback and its subclasses unchanged, and turns all other exceptions raised in a trace into
# InternalTorchDynamoError. (2.13.0)
ShortenTraceback = exc.ShortenTraceback


def passing_dynamo(error: Exception) -> Exception:
    """Derive an error, equal in type name and message, that Dynamo re-raises unchanged in a trace. (2.13.0)"""
    if isinstance(error, ShortenTraceback):
        return error
    kind: Callable[..., Exception] = type(type(error).__name__, (ShortenTraceback, type(error)), {})
    return kind(*error.args, first_useful_frame=None)


# Dynamo's errors for code it cannot trace, and for a frame that exceeds the recompile limit. (2.13.0)
Unsupported = exc.Unsupported
FailOnRecompileLimitHit = exc.FailOnRecompileLimitHit

# The base of Dynamo's errors, the error of an op that fails in a trace, and the type of torch.compile(module). (2.13.0)
TorchDynamoException = exc.TorchDynamoException
TorchRuntimeError = exc.TorchRuntimeError
OptimizedModule = torch._dynamo.OptimizedModule

# Whether Dynamo's guards and bytecode have the form that `compile_fsdp.replay` reads. (2.13.0, 2.15.0)
CAN_REPLAY = torch.__version__ >= "2.13"

# Excludes a code object's frames from compilation; compiled callers still inline them. (2.13.0)
skip_code = eval_frame.skip_code

# call_with_side_effects(fn, *args) lets fn mutate objects from outside a higher-order op's body. (2.13.0)
call_with_side_effects = utils._disable_side_effect_safety_checks_for_current_subtracer

# The ops that read and set version counters in a graph. The import of their module defines them. (2.13.0)
tensor_version: OpOverload = tensor_version_op._tensor_version
set_version_counter: OpOverload = tensor_version_op._unsafe_set_version_counter

# The type of the graph input that carries hooks, which Dynamo sets on it after the forward. (2.13.0)
_BackwardState = _backward_state.BackwardState

# The tracer class that rebuilds a GraphModule's graph from its code on unpickling, and the renaming of a node. (2.13.0)
needs_attributes(torch.fx.GraphModule, "_tracer_cls")
needs_attributes(torch.fx.Node, "_rename")

# The context object of Dynamo's current attempt to trace a frame; None outside a trace. (2.13.0)
tracing_context: Callable[[], object] = torch._guards.TracingContext.try_get

# Dynamo's id of the current compilation: the frame and the attempt. (2.13.0)
current_compile_id: Callable[[], object] = torch._guards.CompileContext.current_compile_id

# Let Dynamo make a dim of a graph input dynamic, unless the graph specializes its size. (2.13.0)
mark_changing: Callable[[torch.Tensor, int], None] = torch._dynamo.maybe_mark_dynamic

# The Dynamo backend registered under a name. (2.13.0)
lookup_backend: Callable[[str], Callable[..., Any]] = torch._dynamo.lookup_backend

# Metrics of the last 64 frame compilations, as Dynamo records them. (2.13.0)
last_compilations: Callable[[], list[Any]] = utils.get_compilation_metrics

# Counters of Dynamo and of the compilers below it in this process, by category and event. (2.13.0)
dynamo_counters: Mapping[str, MutableMapping[str, int]] = utils.counters

# The logger that gets, at level DEBUG, the user's code line and the reason of each graph break. (2.13.0)
graph_break_logger: logging.Logger = symbolic_convert.graph_break_log


@needs("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")
def count_outer_tracers() -> int:
    """Count the higher-order regions, such as checkpoint bodies, around the code that Dynamo traces now. (2.13.0)"""
    tracer, count = symbolic_convert.InstructionTranslator.current_tx().output.current_tracer, 0
    while tracer.parent is not None:
        tracer, count = tracer.parent, count + 1
    return count


def mark_static(tensor: torch.Tensor) -> None:
    """Keep Dynamo from turning the sizes of a graph input into symbols. (2.13.0)

    This function works inside a trace, too; torch._dynamo.mark_static works only outside.
    """
    for each in (tensor, tensor._base):  # Dynamo reads a view's sizes through its base
        if each is not None:
            each._dynamo_static_indices = set(range(each.dim()))  # type: ignore[attr-defined]
            each._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


@needs("torch._dynamo.eval_frame.check_if_dynamo_supported")
def why_dynamo_refuses() -> str | None:
    """The reason why Dynamo does not support this interpreter; None if it does. (2.13.0)"""
    try:
        eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


def compile_for_many(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    filter_guards: Callable[[Sequence[Any]], Sequence[bool]] | None,
) -> Callable[..., Any]:
    """Compile, without graph breaks, a function that many modules share; each module gets its own graph. (2.13.0)

    With `filter_guards`, Dynamo looks up the object of every guard a second time.
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
    """Settings of a compiled module or function."""

    backend: str  # name of the Dynamo backend
    fullgraph: bool  # whether a graph break is an error


@needs("torch._dynamo.eval_frame._TorchDynamoContext", "torch._dynamo.eval_frame.innermost_backend")
def compile_settings(compiled: Any) -> CompileSettings | None:
    """The torch.compile settings of a compiled module or function; None if they cannot be read. (2.13.0)"""
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and hasattr(compiled, "__closure__"):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    if not isinstance(context, eval_frame._TorchDynamoContext) or not callable(context.callback):
        return None
    backend: Any = eval_frame.innermost_backend(context.callback)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    return CompileSettings(str(name), bool(getattr(context, "fullgraph", False) or context.error_on_graph_break))


class GuardFact(NamedTuple):
    """A Dynamo guard."""

    kind: str  # such as "TYPE_MATCH"
    name: str  # the expression of the guarded object; empty for torch's global state
    argument: Any  # such as an attribute's name; None for most kinds


def guard_facts(entries: Sequence[Any]) -> list[GuardFact]:
    """The guards of a graph, from the entries that Dynamo passes to `guard_filter_fn`. (2.13.0)"""
    facts = []
    for entry in entries:
        make: Any = entry.orig_guard.create_fn
        arguments = [*getattr(make, "args", ()), *getattr(make, "keywords", {}).values()]
        facts.append(GuardFact(entry.guard_type, entry.orig_guard.name, arguments[0] if arguments else None))
    return facts


def forget_guarded_objects(entries: Sequence[Any]) -> None:
    """Let Dynamo make guards again behind a `guard_filter_fn`; it would compare NumPy arrays by `==`. (2.13.0)"""
    for entry in entries:
        entry.orig_guard.obj_weakref = None


@needs("torch._dynamo.convert_frame.register_bytecode_hook")
@contextlib.contextmanager
def on_bytecode(see: Callable[[CodeType, CodeType], None]) -> Iterator[None]:
    """Call `see` with the original and the new code of every frame that Dynamo compiles inside. (2.13.0)"""
    handle = convert_frame.register_bytecode_hook(cast(Any, see))
    try:
        yield
    finally:
        handle.remove()


@needs("torch._dynamo.callback.callback_handler.register_end_callback", "torch._dynamo.exc.Unsupported")
def explain_untraceable_hooks(remedy: str) -> None:
    """Put `remedy` before the message of an error that Dynamo raises in a hook of torch's own `fully_shard`. (2.13.0)

    With `fullgraph=True`, Dynamo raises it without calling a backend. The callback at the end of a compilation runs
    while the error is on its way. torch._dynamo.reset() removes the callback.
    """

    def explain(arguments: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, exc.Unsupported):
            return
        names = [frame.name for frame in error.real_stack if "_fully_shard" in frame.filename]
        if names and names[0] != "unshard":  # which a forward calls itself
            error.args = (f"{remedy}\n\n{error}", *error.args[1:])

    callback.callback_handler.register_end_callback(explain)


def compiles_frames() -> bool:
    """Whether Dynamo intercepts new frames in this thread. (2.13.0)"""
    callback = get_eval_frame_callback()
    return callback is not None and callback is not False


@needs("torch._dynamo.config.disable")
def is_disabled() -> bool:
    """Whether Dynamo's config or the environment turns torch.compile off. (2.13.0)"""
    return torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


@needs("torch._guards.TracingContext.get_traced_code")
def traced_code() -> list[CodeType]:
    """The code objects that Dynamo traced into the graph it compiles now. (2.13.0)"""
    return list(torch._guards.TracingContext.get_traced_code() or ())


@needs("torch._dynamo.config.patch")
def recompile_limit(limit: int) -> contextlib.AbstractContextManager[object]:
    """Set how many times Dynamo may compile one code object. (2.13.0)"""
    return torch._dynamo.config.patch(recompile_limit=limit)  # type: ignore[no-any-return]


@needs("torch._dynamo.config.patch")
def without_side_effect_log() -> contextlib.AbstractContextManager[object]:
    """Keep Dynamo from capturing stacks for its side-effect log, unless that log is enabled. (2.13.0)

    Dynamo captures and formats stacks in every trace: 5 % of a first step of 24 blocks (2026-11-24).
    """
    is_read = "TORCH_TRACE" in os.environ or "side_effects" in os.environ.get("TORCH_LOGS", "")
    if is_read or getattr(torch._dynamo.config, "side_effect_replay_policy", None) != "info":
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(side_effect_replay_policy="silent")  # type: ignore[no-any-return]


_trace_structured = Late("torch._logging._internal.trace_structured")


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to torch's structured trace, if TORCH_TRACE enables it. (2.13.0)"""
    metadata = {"name": name, "encoding": "json"}
    _trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload, expect_trace_id=False)


def copy_dynamo_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a Dynamo graph with the data that AOTAutograd reads: metadata, attributes, input sources. (2.13.0)"""
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


def input_fqn(node: torch.fx.Node) -> str:
    """FQN of the parameter behind a placeholder of a Dynamo graph, below the object that holds the model. (2.11.0)"""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    text = name if isinstance(name, str) else name()  # a method before 2.12
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", text)) or node.name


def ban_recomputation(node: torch.fx.Node) -> None:
    """Forbid AOTAutograd's partitioner to recompute a Dynamo graph's node in the backward. (2.13.0)"""
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def request_recomputation(node: torch.fx.Node) -> None:
    """Make AOTAutograd's partitioner recompute a Dynamo graph's node in the backward. (2.13.0)

    The node gets checkpoint number 0, which no user checkpoint has because Dynamo counts them from 1.
    """
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 0


def recomputation(node: torch.fx.Node) -> object:
    """Return whether AOTAutograd's partitioner must recompute a Dynamo graph's node; None if it may decide. (2.13.0)"""
    return node.meta.get("recompute")


# Key in node.meta["custom"], where torch keeps users' annotations. AOTAutograd copies these to the nodes that it traces
# from an annotated node. (2.11.0, 2.13.0)
_OFFLOADED = "compile_fsdp.offloaded"


def request_offload(node: torch.fx.Node, least_bytes: int) -> None:
    """Request that AOTAutograd's nodes for a Dynamo node offload results of at least `least_bytes`. (2.13.0)"""
    node.meta["custom"] = {**node.meta.get("custom", {}), _OFFLOADED: least_bytes}


def least_offloaded_bytes(node: torch.fx.Node) -> int | None:
    """The bytes from which an AOTAutograd node's result is offloaded; None if it is never offloaded. (2.13.0)"""
    return cast("int | None", node.meta.get("custom", {}).get(_OFFLOADED))


def module_stack(node: torch.fx.Node) -> list[str]:
    """Dynamo's names for a node's modules, such as "L['self'].layers.0", the innermost last. (2.13.0)

    Of a module that Dynamo has first met through FSDP2's state, the part of the name behind the state. A node of a
    derived backward has the modules of its forward node.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [str(name).rpartition("._module_info.module.")[2] for name, _ in stack.values()]


def traced_in(node: torch.fx.Node, folder: str) -> bool:
    """Whether the code line behind a Dynamo graph's node is in a file below a folder. (2.13.0)"""
    *_, last = re.findall(r'File "(.*?)"', node.stack_trace or "") or [""]
    return folder in last


def graph_input_example(node: torch.fx.Node) -> Any:
    """The real object behind a Dynamo graph's placeholder, available while Dynamo compiles the graph. (2.13.0)"""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def fake_mode_of(gm: torch.fx.GraphModule) -> Any:
    """The FakeTensorMode of a Dynamo graph's fake values; None for a graph without fake values. (2.13.0)"""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def release_real_tensors(fake_mode: Any) -> None:
    """Drop a FakeTensorMode's weak references to the real tensors of its fake tensors. (2.13.0)

    `Module.to` swaps a DTensor parameter with its converted tensor, which fails while a weak reference exists.
    """
    describer = fake_mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


def is_hooks_input(node: torch.fx.Node) -> bool:
    """Whether a Dynamo graph's placeholder is the BackwardState, which carries the deferred hooks. (2.13.0)"""
    return isinstance(node.meta.get("example_value"), _BackwardState)


def has_hooks_input(gm: torch.fx.GraphModule) -> bool:
    """Whether a Dynamo graph has a BackwardState input. (2.13.0)"""
    return any(is_hooks_input(node) for node in gm.graph.find_nodes(op="placeholder"))


class DeferredHook(NamedTuple):
    """A call in a Dynamo graph that registers a hook of the BackwardState on an intermediate."""

    tensor: torch.fx.Node
    name: str  # the attribute of the BackwardState


def deferred_hook(node: torch.fx.Node) -> DeferredHook | None:
    """The hook registration that a node calls; None if the node calls something else. (2.13.0)"""
    if getattr(node.target, "__name__", "") != "_register_hook_trampoline" or len(node.args) != 2 or node.users:
        return None
    variables = inspect.getclosurevars(cast(Any, node.target)).nonlocals
    tensor = node.args[0]
    if variables.get("name") != "register_hook" or "hook_name" not in variables:
        return None
    return DeferredHook(tensor, variables["hook_name"]) if isinstance(tensor, torch.fx.Node) else None
