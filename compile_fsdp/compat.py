"""Every private torch name this project uses, in one place.

Each entry names the torch release whose code it was checked with; all of them are tested with every supported one
(docs/compatibility.md). A name that has moved is reported by its full path, and never as an AttributeError inside a
hook: `versions.py` looks them up.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

# --- Tracing --------------------------------------------------------------------------------------------------
import torch._dynamo
from torch import nn

# The key-value stores that process groups meet at. (2.13.0)
from torch._C._distributed_c10d import Store as Store
from torch._dynamo import compiled_autograd as _compiled_autograd

# Frames of this code are not compiled on their own, but are still inlined into a compiled caller. (2.13.0)
from torch._dynamo.eval_frame import skip_code as skip_code

# --- Errors ---------------------------------------------------------------------------------------------------
# Dynamo re-raises ShortenTraceback and its subclasses unchanged; any other exception raised while it traces
# becomes an InternalTorchDynamoError. (2.13.0)
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.exc import Unsupported as Unsupported

# The tracer of the frame that Dynamo is in. (2.13.0)
from torch._dynamo.symbolic_convert import InstructionTranslator

# call_with_side_effects(fn, *args) lets fn change objects outside of a higher-order op's body. (2.13.0)
from torch._dynamo.utils import (
    _disable_side_effect_safety_checks_for_current_subtracer as _call_with_side_effects,
)

# Per-call settings of AOTAutograd, and the input of a graph that gets its hooks after it has run. (2.13.0)
from torch._functorch import config as functorch_config

# --- Estimating -----------------------------------------------------------------------------------------------
# Tensors without data on any device, and a mode that sees every op below autograd. (2.13.0)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# --- FSDP2 ----------------------------------------------------------------------------------------------------
# The state that torch's own fully_shard builds; the runtime reads and writes these classes' attributes. (2.13.0)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo as DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState as ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param import free_storage as free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental._backward_state import BackwardState
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

# Communicators that do what the functional collectives do; the second of each differs in who allocates. (2.13.0)
PLAIN_ALL_GATHERS = (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.ProcessGroupAllocAllGather)
PLAIN_REDUCE_SCATTERS = (_fsdp_collectives.DefaultReduceScatter, _fsdp_collectives.ProcessGroupAllocReduceScatter)
# Communicators over symmetric memory, which a graph cannot allocate. (2.13.0)
SYMMETRIC_MEMORY_COMMS = tuple(
    getattr(_fsdp_collectives, name)
    for name in ("SymmMemAllGather", "SymmMemReduceScatter")
    if hasattr(_fsdp_collectives, name)  # since 2.12
)
gradient_divide_factors = _fsdp_collectives._get_gradient_divide_factors

call_with_side_effects = _call_with_side_effects
# The collectives as ops of a graph, and the copy-in that pads each tensor's rows to a multiple of the ranks. (2.13.0)
functional_collectives = torch.ops._c10d_functional
chunk_cat = torch.ops.aten._chunk_cat
# Inside, in-place writes leave the tensors' version counters as they are. (2.13.0)
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def runs_while_tracing(function: _Function) -> _Function:
    """Decorator: run the function for real while Dynamo traces its caller; its result becomes a constant. (2.13.0)

    The arguments are constants, too; for an object as the first, see `runs_while_tracing_for`.
    """
    marked: _Function = torch._dynamo.assume_constant_result(function)
    return marked


def runs_while_tracing_for(function: _Function) -> _Function:
    """The same for a function of any object and further constants; the graph is guarded by the object's identity.

    torch 2.11 takes nothing but constants: there the function gets the object's id, by which Dynamo guards. (2.13.0)
    """
    if torch.__version__ >= "2.12":
        return runs_while_tracing(function)

    @runs_while_tracing
    def call_by_id(number: int, *constants: Any) -> Any:
        # The caller holds the object.
        return function(ctypes.cast(number, ctypes.py_object).value, *constants)

    def call(subject: object, *constants: Any) -> Any:
        return call_by_id(id(subject), *constants)

    return call  # type: ignore[return-value]


def fsdp_state(module: nn.Module) -> FSDPState | None:
    """The FSDP2 state of a module that `fully_shard` was applied to, else None."""
    from torch.distributed._composable_state import _get_module_state

    state = _get_module_state(module)
    return state if isinstance(state, FSDPState) else None


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The state's parameter groups: a list since 2.12, one optional group on 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def reset_iter_state(state: FSDPState) -> None:
    """Make torch's own state of the root fit for a next step after one that was interrupted. (2.13.0)

    torch does it itself since 2.13. Before, it is done from outside: one wait for the device stands for all events.

    Raises:
        RuntimeError: the state is not the root's.
    """
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
        return
    if state._is_root is False:
        raise RuntimeError("expected the root of the FSDP2 modules for reset_iter_state(), got one below it")
    if state._is_root is None:
        return  # no step has begun
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    comm: Any = state._comm_ctx
    comm.all_gather_state = None
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    context = state._state_ctx
    for each in context.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in param_groups(each):
            group.finalize_backward()
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def reduces_unused(group: FSDPParamGroup) -> bool:
    """Whether zeros are reduced for parameters without a gradient, see `set_reduce_scatter_unused_params`. (2.13.0)"""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


# Dynamo cannot trace a comparison of versions.
_UNSHARDED_SPEC = "_unsharded_dtensor_spec" if torch.__version__ >= "2.12" else "_tp_spec"


def unsharded_spec(parameter: FSDPParam) -> DTensorSpec:
    """Mesh, placements and shape of the unsharded parameter, which is a DTensor. (2.13.0)"""
    spec = getattr(parameter, _UNSHARDED_SPEC)
    assert isinstance(spec, DTensorSpec)
    return spec


def has_spmd_mesh(parameter: FSDPParam) -> bool:
    """Whether the parameter is a DTensor over a mesh whose data-parallel dims were named; since 2.12. (2.13.0)"""
    return bool(getattr(parameter.mesh_info, "is_spmd_mesh", False))


def has_spmd_types(parameter: FSDPParam) -> bool:
    """Whether the parameter has SPMD types in place of placements; since 2.15. (2.15.0)"""
    return bool(getattr(parameter, "is_spmd_types", False))


def has_own_grad_dtype(parameter: FSDPParam) -> bool:
    """Whether the user has set the sharded parameter's `grad_dtype`, which FSDP2 heeds since 2.15. (2.15.0)"""
    return bool(getattr(parameter, "_has_sharded_grad_dtype_override", False))


def ends_backward_by_hand(state: FSDPState) -> bool:
    """Whether the user calls `finalize_backward` after each backward; since 2.15. (2.15.0)"""
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


# 2.15 has rebuilt the gradients of FSDP2 around `Tensor.grad_dtype`.
_HAS_GRAD_DTYPES = torch.__version__ >= "2.15"


def reduce_dtype(group: FSDPParamGroup, original: torch.dtype) -> torch.dtype | None:
    """In which dtype gradients are reduced; None for their own. (2.13.0, 2.15.0)

    Args:
        group: Whose policy tells.
        original: The parameters' dtype.
    """
    if group._reduce_dtype is None and _HAS_GRAD_DTYPES:
        return original
    return group._reduce_dtype


def default_reduce_dtype(computed: torch.dtype, original: torch.dtype) -> torch.dtype:
    """The same where the policy does not tell. (2.13.0, 2.15.0)

    Args:
        computed: The dtype of the gradients.
        original: The parameters'.
    """
    return original if _HAS_GRAD_DTYPES else computed


# Whether eager FSDP2 holds the input of a group's reduction until that of the next group is over. (2.12.0)
HOLDS_REDUCE_INPUT = "2.12" <= torch.__version__ < "2.13"


def accumulated_gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """The unsharded gradient of earlier microbatches, if it is kept apart; see `free_gradient_dtypes`. (2.13.0)"""
    grad: torch.Tensor | None = getattr(parameter, _ACCUMULATED_GRAD, None)
    return grad


def set_accumulated_gradient(parameter: FSDPParam, grad: torch.Tensor | None) -> None:
    """Keep that gradient apart, or forget it. (2.13.0)"""
    setattr(parameter, _ACCUMULATED_GRAD, grad)


# Eager FSDP2 kept gradients that are not in the unsharded parameter's dtype apart up to 2.14; since then we do.
_ACCUMULATED_GRAD = "_compile_fsdp_accumulated_grad" if _HAS_GRAD_DTYPES else "unsharded_accumulated_grad"


def describe_partial_output(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
    """Say whose gradients are in the output that awaits its all-reduce; eager FSDP2 asks since 2.15. (2.15.0)"""
    if not _HAS_GRAD_DTYPES:
        return
    layout: dict[FSDPParam, tuple[int, int]] = group._partial_reduce_output_layout  # type: ignore[attr-defined]
    layout.clear()
    offset = 0
    for param in params:
        numel = param.padded_sharded_param_size.numel()
        layout[param] = (offset, numel)
        offset += numel


def free_gradient_dtypes(group: FSDPParamGroup) -> None:
    """Let a compiled backward accumulate gradients in the dtype it computes them in; fixed since 2.15. (2.15.0)

    Those of earlier microbatches that have another one are kept apart: a graph takes no parameter with such a gradient.
    """
    for param in _with_gradient_dtype(group):
        unsharded, earlier = param._unsharded_param, None
        if unsharded.grad is not None and unsharded.grad.dtype != unsharded.dtype:
            earlier, unsharded.grad = unsharded.grad, None
        set_accumulated_gradient(param, earlier)
        unsharded.grad_dtype = None


def fix_gradient_dtypes(group: FSDPParamGroup) -> None:
    """Leave unsharded gradients as eager FSDP2 accumulates them since 2.15. (2.15.0)"""
    for param in _with_gradient_dtype(group):
        unsharded, dtype = param._unsharded_param, param.unsharded_grad_dtype  # type: ignore[attr-defined]
        earlier, grad = accumulated_gradient(param), unsharded.grad
        if earlier is not None:
            grad = earlier if grad is None else earlier + grad
        set_accumulated_gradient(param, None)
        unsharded.grad = None
        unsharded.grad_dtype = dtype
        unsharded.grad = None if grad is None else grad.to(dtype)


def _with_gradient_dtype(group: FSDPParamGroup) -> list[FSDPParam]:
    return [param for param in group.fsdp_params if _HAS_GRAD_DTYPES and param.sharded_param.requires_grad]


def parameter_owners(parameter: FSDPParam) -> list[tuple[nn.Module, str]]:
    """The modules that hold a managed parameter, each with its own name for it; several if it is shared. (2.13.0)"""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def shard_extent(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of what the rank at `coordinate` of a mesh holds of a DTensor. (2.13.0)

    An empty shard has the dim's size as its offset.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh_shape), list(coordinate), placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor keeps on this rank, itself and not a view; any other tensor as it is. (2.13.0)"""
    return getattr(tensor, "_local_tensor", tensor)


@runs_while_tracing
def is_deep_in_regions() -> bool:
    """While Dynamo traces: whether more than one region, as a checkpoint's, surrounds the code.

    Up to torch 2.15 no tensor gets out of two of them as an attribute of an object: "does not belong to this Graph".
    (2.13.0)
    """
    tracer = InstructionTranslator.current_tx().output.current_tracer
    return tracer.parent is not None and tracer.parent.parent is not None


def tracing_context() -> object:
    """The object that stands for Dynamo's current attempt to trace a frame, None outside of one. (2.13.0)"""
    return torch._guards.TracingContext.try_get()


def mark_static(tensor: torch.Tensor) -> None:
    """Keep Dynamo from turning the sizes of a graph input into symbols, also while it traces. (2.13.0)

    torch._dynamo.mark_static does so only outside of a trace.
    """
    for each in (tensor, tensor._base):  # a view's sizes are found through its base
        if each is not None:
            each._dynamo_static_indices = set(range(each.dim()))  # type: ignore[attr-defined]
            each._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


# What compiled autograd's flag was before each `defer_hook_bodies`; empty unless a trace is between the two calls.
_flags_before: list[bool] = []


@runs_while_tracing
def defer_hook_bodies() -> None:
    """While Dynamo traces: let hooks of tensors and modules leave their bodies to the backward's own trace.

    Dynamo decides this by compiled autograd's flag, for the user's own hooks as for ours. Left on, it would change
    how other code is traced. (2.13.0)
    """
    _flags_before.append(_compiled_autograd.compiled_autograd_enabled)
    _compiled_autograd.compiled_autograd_enabled = True


@runs_while_tracing
def restore_hook_bodies() -> None:
    """Undo one `defer_hook_bodies`; nothing if the trace in which it was called has ended."""
    if _flags_before:
        _compiled_autograd.compiled_autograd_enabled = _flags_before.pop()


def restore_hook_bodies_now() -> None:
    """Undo every `defer_hook_bodies` of a trace that has ended, or failed."""
    if _flags_before:
        _compiled_autograd.compiled_autograd_enabled = _flags_before[0]
        _flags_before.clear()


@contextlib.contextmanager
def compiled_autograd(compiler: Callable[[torch.fx.GraphModule], Callable[..., Any]]) -> Iterator[None]:
    """Compile every backward that is started inside, on this thread. Sizes are static until they change. (2.13.0)"""
    with contextlib.ExitStack() as stack:
        if torch._dynamo.eval_frame._stance.stance == "force_eager":
            # The stance came after the forward was compiled; only a compiled backward fits that one.
            stack.enter_context(torch.compiler.set_stance("default"))
        stack.enter_context(_compiled_autograd._enable(compiler, dynamic=False))
        yield


def get_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The version counters by which autograd notices in-place writes. (2.13.0)"""
    return [tensor._version for tensor in tensors]


def set_versions(tensors: Sequence[torch.Tensor], versions: list[int]) -> None:
    """Set version counters back. (2.13.0)"""
    if get_versions(tensors) != versions:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def will_run(node: Any) -> bool:
    """Whether the autograd node takes part in the `.backward()` that runs now; False for a dead one. (2.13.0)"""
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def accumulates_into(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs now accumulates, or has, a gradient into `leaf`.

    Not if nothing leads there, and not inside of `torch.autograd.grad` and `backward(inputs=...)` with other inputs;
    the engine refuses the question (RuntimeError) for a leaf that `torch.autograd.grad` captures. (2.13.0)
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


# --- Custom ops ---------------------------------------------------------------------------------------------
# Checked on 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0: by running it on 2.13.0, in the sources of the others.

# An op with its overload, as the target of a graph's call_function node.
OpOverload = torch._ops.OpOverload

# Whether a kernel was registered for exactly this key; fallbacks and the kernels of alias keys do not count.
_dispatch_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

# Functionalization's tensor wrapper: is it one, apply the writes it has pending, take it off.
_is_functional_tensor = torch._is_functional_tensor
_sync: Callable[[torch.Tensor], None] = torch._sync  # type: ignore[attr-defined]
_from_functional_tensor = torch._from_functional_tensor

_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard


_DISPATCH_KEYS_OF_EAGER_CODE = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


def plain_dispatch() -> contextlib.AbstractContextManager[None]:
    """Inside an op's kernel: run code as if it was called from eager Python, with autograd and version counters.

    The dispatcher calls a kernel with the layers above it switched off. (2.13.0)
    """
    return torch._C._ForceDispatchKeyGuard(*_DISPATCH_KEYS_OF_EAGER_CODE)


def op_schema(op: OpOverload) -> str:
    """`namespace::op(arguments) -> returns`, as torch prints it."""
    return str(op._schema)


def has_kernel(op_name: str, dispatch_key: str) -> bool:
    return _dispatch_has_kernel(op_name, dispatch_key)


def unwrap_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that functionalization wraps, with its pending writes; any other tensor as it is."""
    if not _is_functional_tensor(tensor):
        return tensor
    _sync(tensor)
    return _from_functional_tensor(tensor)


@contextlib.contextmanager
def below_functionalization() -> Iterator[None]:
    with _ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
        yield


# Inductor's table of lowerings. Importing it imports Inductor, so these functions import it when called.
def has_inductor_lowering(op: OpOverload) -> bool:
    from torch._inductor.lowering import lowerings

    return op in lowerings


def inductor_lowering(op: OpOverload) -> Callable[..., object]:
    from torch._inductor.lowering import lowerings

    return lowerings[op]


def register_inductor_lowering(op: OpOverload, lowering: Callable[..., object]) -> None:
    """Add a lowering that gets its arguments as they are, not promoted to one dtype."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lowering)


def register_collective_lowering(op: OpOverload) -> None:
    """Lower an op that starts a collective as Inductor lowers the functional collectives. (2.13.0)

    Inductor then keeps what is sent and what is received as they are until the wait.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides

    def lower(tensor: Any, *args: object) -> object:
        launched: Any = ir._CollectiveKernel.create_out_of_place(op, tensor, *args)
        return ir.TensorBox.create(launched)

    add_layout_constraint(op, constrain_to_fx_strides)
    register_inductor_lowering(op, lower)


# --- Optimizers and wrappers ------------------------------------------------------------------------------------


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """The class's own `step`, without the step hooks and the profiler's range that torch puts around it. (2.13.0)"""
    step: Any = type(optimizer).step
    return cast(Callable[..., object], step.__wrapped__ if getattr(step, "hooked", False) else step)


def wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a module only wraps: it has no place in an FQN. None for any other module. (2.13.0)"""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    if isinstance(module, torch._dynamo.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, ActivationWrapper):  # of activation checkpointing and of offloading
        return "_checkpoint_wrapped_module"
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    return None


# --- Counting -------------------------------------------------------------------------------------------------
class CompileCounts(NamedTuple):
    """What Dynamo has done in this process so far."""

    graph_breaks: int
    recompiles: int  # of the last 64 compilations, which is how many Dynamo remembers
    captures: int  # graphs that Dynamo or compiled autograd traced


def compile_counts() -> CompileCounts:
    """Dynamo's own counters. (counters, get_compilation_metrics: checked on 2.13.0)"""
    from torch._dynamo.utils import counters, get_compilation_metrics

    return CompileCounts(
        graph_breaks=sum(counters["graph_break"].values()),
        recompiles=sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics()),
        captures=counters["stats"]["unique_graphs"] + counters["compiled_autograd"]["captures"],
    )


# Before each note, among the names of what Inductor counts.
_NOTE = "compile_fsdp "


def leave_note(note: str) -> None:
    """While Inductor compiles a graph: store a note with it, in its caches.

    Inductor stores what it has counted during the compilation, and counts it again when the graph comes from a cache:
    the note is the name of a count. (counters["inductor"], CompiledFxGraph.counter_deltas: checked on 2.13.0)
    """
    from torch._dynamo.utils import counters

    counters["inductor"][_NOTE + note] += 1


def take_notes() -> list[str]:
    """The notes of graphs that were compiled, or came from a cache, since the last call. Each is listed once."""
    from torch._dynamo.utils import counters

    names = [name for name in counters["inductor"] if name.startswith(_NOTE)]
    for name in names:
        del counters["inductor"][name]
    return [name.removeprefix(_NOTE) for name in names]


# --- Compiling ------------------------------------------------------------------------------------------------


def list_backends() -> list[str]:
    """Names of the registered Dynamo backends, debugging ones included. (2.13.0)"""
    return list(torch._dynamo.list_backends(exclude_tags=()))


def inductor_option_names() -> frozenset[str]:
    """Names that `torch.compile(options=...)` accepts for Inductor. (2.13.0)"""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options behind a mode of `torch.compile(mode=...)`; RuntimeError if there is none. (2.13.0)"""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    backend: str,
    inductor_config: Mapping[str, Any],
    backward_is_captured: bool,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with a registered backend. (2.13.0)

    Args:
        gm: The graph; it is the compiler's from now on.
        example_inputs: Its inputs.
        backend: The registered backend.
        inductor_config: For "inductor" alone.
        backward_is_captured: The backward of the graph, if it has one, runs under compiled autograd only, and has no
            BackwardState.
    """
    # A saved view of an unsharded parameter would keep its storage alive, or read it after it was freed:
    # views are computed again in the backward from the parameter itself.
    settings: dict[str, Any] = {"recompute_views": True}
    if backend != "inductor":
        with functorch_config.patch(settings):
            return cast(Callable[..., Any], torch._dynamo.lookup_backend(backend)(gm, list(example_inputs)))
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    config = dict(inductor_config)
    compile_inner: Any = compile_fx_inner
    if backward_is_captured:
        from compile_fsdp.unused_backward import ForwardCompiler, Partitioner

        config["custom_partitioner_fn"] = Partitioner(config.get("custom_partitioner_fn"))
        compile_inner = ForwardCompiler(compile_fx_inner)
        # AOTAutograd stores a graph once it has both compiled halves: it is to ask for the second at once.
        settings["force_non_lazy_backward_lowering"] = True
    with functorch_config.patch(settings):
        compiled: Any = compile_fx(gm, list(example_inputs), compile_inner, config_patches=config)
    return cast(Callable[..., Any], compiled)


def compile_for_many(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile without graph breaks, of a function that many modules share, each with its own graph. (2.13.0)"""
    arguments: dict[str, Any] = {"fullgraph": True, "backend": backend}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        arguments["recompile_limit"] = 1000
    compiled: Callable[..., Any] = torch.compile(function, **arguments)
    return compiled


def without_side_effect_log() -> contextlib.AbstractContextManager[object]:
    """Within it, Dynamo takes no stacks for its log of side effects, unless someone reads that. (2.13.0)

    It takes and formats them for every trace: 5 % of a first step of 24 blocks (2026-11-24).
    """
    is_read = "TORCH_TRACE" in os.environ or "side_effects" in os.environ.get("TORCH_LOGS", "")
    if is_read or getattr(torch._dynamo.config, "side_effect_replay_policy", None) != "info":
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(side_effect_replay_policy="silent")  # type: ignore[no-any-return]


def inductor_output_type() -> Any:
    """The class of what Inductor compiles a graph to, which AOTAutograd's cache stores. (2.13.0)"""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def copy_cache_key(source: Any, target: Any) -> None:
    """Let AOTAutograd's cache refer to a compiled graph as if it was another one. (2.13.0)"""
    for name in ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr"):
        setattr(target, name, getattr(source, name, None))


def min_cut_partition(
    gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Inductor's own choice of what the forward saves for the backward. (2.13.0)"""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def set_tracer(gm: torch.fx.GraphModule, tracer: type[torch.fx.Tracer]) -> None:
    """Choose who makes a graph of the module's code again when it is read back. (2.13.0)"""
    gm._tracer_cls = tracer


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a node another name, which must be free. (2.13.0)"""
    node._rename(name)


# Inductor's option with the functions, by full name, that a graph may call and still be cached. (2.13.0)
CACHEABLE_FUNCTIONS = "unsafe_marked_cacheable_functions"


# --- Dynamo's graphs ----------------------------------------------------------------------------------------------


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


def is_hooks_input(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a Dynamo graph is the BackwardState, which gets the hooks after the forward. (2.13.0)"""
    return isinstance(node.meta.get("example_value"), BackwardState)


def has_hooks_input(gm: torch.fx.GraphModule) -> bool:
    """Whether a Dynamo graph gets a BackwardState. (2.13.0)"""
    return any(is_hooks_input(node) for node in gm.graph.find_nodes(op="placeholder"))


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


def compiled_autograd_function(name: str) -> Callable[..., Any]:
    """The function that compiled autograd has bound for a kind of autograd node. (2.13.0)"""
    bound: Callable[..., Any] = _compiled_autograd.ops.get(name)
    return bound


def is_accumulate_grad(target: object) -> bool:
    """Whether a node's target is compiled autograd's gradient accumulation. (2.13.0)"""
    return isinstance(target, _compiled_autograd.Op) and target.__name__ == "AccumulateGrad"


def may_hand_on(target: object) -> bool:
    """Whether a node's target is a function of compiled autograd that often returns its arguments. (2.13.0)"""
    if isinstance(target, _compiled_autograd.Op):
        return target.__name__ == "validate_outputs"
    return getattr(target, "__name__", "") == "call_aot_bwd_prologue"


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


def graph_input_example(node: torch.fx.Node) -> Any:
    """The real object behind a placeholder of a Dynamo graph, while Dynamo compiles it. (2.13.0)"""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def ban_recomputation(node: torch.fx.Node) -> None:
    """Keep AOTAutograd's partitioner from computing a node of a Dynamo graph again in the backward. (2.13.0)"""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def graph_input_position(node: torch.fx.Node) -> int | None:
    """The position, among the inputs of the Dynamo graph, of a placeholder of Inductor's graph. (2.13.0)"""
    return getattr(node.meta.get("desc"), "idx", None)


# --- Passes ---------------------------------------------------------------------------------------------------
# What the targets of call_function nodes are, besides OpOverload and plain functions. (checked on 2.13.0)
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator

# The classes Inductor wants for a pass and a partitioner whose compiled graphs it may cache. (checked on 2.13.0)
# The traceable version-counter ops; importing them defines them. (checked on 2.13.0)
from torch._dynamo import tensor_version_op as _tensor_version_op  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # noqa: E402
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn  # noqa: E402

tensor_version: OpOverload = _tensor_version_op._tensor_version
set_version_counter: OpOverload = _tensor_version_op._unsafe_set_version_counter

# Key in node.meta under which Inductor's pattern matcher numbers the stretches between mutations; it numbers
# the graph again where the first node lacks it. (checked on 2.13.0)
MUTATION_REGION_KEY = "mutation_region_id"


class ArgumentAliasing(NamedTuple):
    """What an op's schema declares about one argument."""

    name: str
    keyword_only: bool
    written: bool
    aliased: bool  # by a result, as far as the schema tells


def argument_aliasing(op: OpOverload) -> tuple[ArgumentAliasing, ...]:
    """The declared aliasing of each argument, in schema order. (checked on 2.13.0)"""
    return tuple(
        ArgumentAliasing(
            name=argument.name,
            keyword_only=argument.kwarg_only,
            written=argument.alias_info is not None and argument.alias_info.is_write,
            aliased=argument.alias_info is not None,
        )
        for argument in op._schema.arguments
    )


def op_name(op: OpOverload | HigherOrderOperator) -> str:
    """`namespace::op`, with `.overload` if it has one; of a higher-order op only `op`. (checked on 2.13.0)"""
    return str(op.name())  # type: ignore[no-untyped-call]


def packet_overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    """Every overload of an op. (checked on 2.13.0)"""
    return tuple(getattr(packet, name) for name in packet.overloads())


def flop_formula(op: OpOverload) -> Callable[..., int] | None:
    """Counts the floating-point operations of a call from its arguments and result, if torch can. (2.13.0)"""
    from torch.utils.flop_counter import flop_registry

    return cast("Callable[..., int] | None", flop_registry.get(op.overloadpacket))


def returns_nothing(op: OpOverload) -> bool:
    """Whether the op is called only for what it writes. (checked on 2.13.0)"""
    return not op._schema.returns


def storage_key(tensor: torch.Tensor) -> int | None:
    """Equal for tensors, fake ones too, on one storage while both live; None without a storage.

    (checked on 2.13.0)
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to torch's structured trace (TORCH_TRACE), if one is recorded. (checked on 2.13.0)"""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=False,
    )


# --- Explaining -----------------------------------------------------------------------------------------------
class Recompilation(NamedTuple):
    """A frame that Dynamo has compiled again."""

    compile_id: str
    function: str
    filename: str
    line: int  # of the function
    reason: str


def recompilations(since_us: int) -> list[Recompilation]:
    """Those that have started since, in microseconds of the epoch, of the last 64 compilations. (2.13.0)"""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        Recompilation(
            str(each.compile_id), each.co_name or "", each.co_filename or "", each.co_firstlineno or 0, reason
        )
        for each in get_compilation_metrics()
        if (reason := each.recompile_reason) is not None and (each.start_time_us or 0) >= since_us
    ]


def graph_break_logger() -> logging.Logger:
    """Where Dynamo says of each graph break, at level DEBUG, in which line of whose code it is and why. (2.13.0)"""
    return torch._logging.getArtifactLogger(  # type: ignore[attr-defined]
        "torch._dynamo.symbolic_convert", "graph_breaks"
    )


def current_compile_id() -> str:
    """Which frame, and which attempt at it, Dynamo compiles now. (2.13.0)"""
    return str(torch._guards.CompileContext.current_compile_id())


def innermost_module(node: torch.fx.Node) -> str | None:
    """How Dynamo refers to the innermost module of a node of the forward: "L['self'].layers.0". (2.13.0)"""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else None


def graph_output_positions(output: torch.fx.Node) -> list[int | None]:
    """By result of Inductor's graph, its position among those of the Dynamo graph. (2.13.0)"""
    return [getattr(each, "idx", None) for each in output.meta.get("desc") or ()]


def group_module_fqn(group: FSDPParamGroup) -> str | None:
    """The FQN of the module, or modules, of a group that is initialised; empty for the root. (2.13.0)"""
    return group._module_fqn


def init_fake_process_group(world_size: int) -> None:
    """Make this process rank 0 of a world whose collectives do nothing. (2.13.0)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


# --- Agreeing ---------------------------------------------------------------------------------------------------
def resolve_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group that ops of a graph call by this name. (2.13.0)"""
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    group: torch.distributed.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def backend_name(group_name: str, device_type: str) -> str | None:
    """What carries a process group's collectives on that kind of device: "gloo", "nccl", "fake". (2.13.0)

    None in a process that has no such group, or no backend for such a device.
    """
    try:
        return str(resolve_group(group_name)._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def world_backend(device_type: str) -> str | None:
    """The same of the process group of all ranks. (2.13.0)"""
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    return None if world is None else backend_name(world.group_name, device_type)


def register_work(tensor: torch.Tensor, work: torch.distributed.Work) -> None:
    """Let `wait_tensor` of the tensor wait for the work. (2.13.0)"""
    torch._C._distributed_c10d._register_work(tensor, work)


def group_store(group: torch.distributed.ProcessGroup) -> Store:
    """The key-value store that the ranks of a process group have met at. (2.13.0)"""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node launches a collective. (2.13.0)"""
    return collective_arguments(node) is not None


def collective_arguments(node: torch.fx.Node) -> dict[str, object] | None:
    """What a node calls a collective with, and its "kind"; None if it is none. (2.13.0)"""
    target = node.target
    op = target.default if isinstance(target, OpOverloadPacket) and hasattr(target, "default") else target
    if not isinstance(op, OpOverload) or op.namespace not in ("_c10d_functional", "compile_fsdp"):
        return None
    names = [argument.name for argument in op._schema.arguments]
    if "group_name" not in names:
        return None
    return {"kind": op_name(op).split("::")[1], **dict(zip(names, node.args, strict=False)), **node.kwargs}


# --- Verifying ------------------------------------------------------------------------------------------------
def after_backward(callback: Callable[[], None]) -> None:
    """Inside a backward: run a function when all of it is over. (2.13.0)"""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Whether this thread runs a backward now. (2.13.0)"""
    return torch._C._current_graph_task_id() != -1


def autocast_dtypes() -> list[torch.dtype]:
    """The dtypes that autocast casts to here, of all devices for which it is on. (2.13.0)"""
    devices = {"cpu", accelerator.type} if (accelerator := torch.accelerator.current_accelerator()) else {"cpu"}
    return [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested values; of a subclass that wraps others, those. (2.13.0)"""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            parts: Any = value
            if is_traceable_wrapper_subclass(parts):
                yield from plain_tensors([getattr(parts, name) for name in parts.__tensor_flatten__()[0]])
            else:
                yield value


# --- Measuring ------------------------------------------------------------------------------------------------
# Whether a profiler is on in this thread. (2.13.0)
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# TORCH_FR_BUFFER_SIZE in the environment, before process groups are created: the flight recorder keeps so many entries,
# and with them the code that issued them, what that was compiled to, and its process groups with their threads.
TRACE_BUFFER_SIZE = "400"


def executed_collectives() -> int:
    """How many collectives this process has executed, by torch's flight recorder. (2.13.0)"""
    # Pickled by this process itself.
    dump: Callable[[], bytes] = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    entries = pickle.loads(dump()).get("entries", [])
    return 1 + max((int(entry["record_id"]) for entry in entries), default=-1)


def allocation_sizes(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes of each allocation, and negative ones of each release, in a profile of memory that is over. (2.13.0)"""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = profile.profiler.kineto_results.events()
    return (event.nbytes() for event in events if event.name() == "[memory]")


def allow_recompiles() -> contextlib.AbstractContextManager[object]:
    """Within it, one function may be compiled for many models. (2.13.0)"""
    return torch._dynamo.config.patch(recompile_limit=1000)  # type: ignore[no-any-return]
