"""Which torch this is for: said at import, by name, before anything else fails for it."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pkgutil import resolve_name
from types import FunctionType

import torch

OLDEST, NEWEST = (2, 11), (2, 15)

# Private names that functions of `compat.py` import or look up; the others it imports with itself.
USED_LATER = (
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._current_graph_task_id",
    "torch._C._distributed_c10d._dump_fr_trace",
    "torch._C._distributed_c10d._register_work",
    "torch._C._will_engine_execute_node",
    "torch._dynamo.OptimizedModule",
    "torch._dynamo.assume_constant_result",
    "torch._dynamo.config.patch",
    "torch._dynamo.eval_frame._stance.stance",
    "torch._dynamo.list_backends",
    "torch._dynamo.lookup_backend",
    "torch._dynamo.utils.counters",
    "torch._dynamo.utils.get_compilation_metrics",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._guards.CompileContext.current_compile_id",
    "torch._guards.TracingContext.try_get",
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._inductor.ir",
    "torch._inductor.list_mode_options",
    "torch._inductor.list_options",
    "torch._inductor.lowering.add_layout_constraint",
    "torch._inductor.lowering.constrain_to_fx_strides",
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.register_lowering",
    "torch._inductor.output_code.OutputCode",
    "torch._logging._internal.trace_structured",
    "torch._logging.getArtifactLogger",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.distributed._composable_state._get_module_state",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils.flop_counter.flop_registry",
)

_FSDP = "torch.distributed.fsdp._fully_shard"

# What the runtime reads and writes of the objects of torch's eager FSDP2, by class. (2.11.0 to 2.15.0) What only some
# of these releases have, `compat.py` looks for itself.
ATTRIBUTES = {
    f"{_FSDP}._fsdp_state.FSDPState": (
        *("_comm_ctx", "_device", "_is_root", "_lazy_init", "_modules", "_modules_to_run_forward", "_mp_policy"),
        *("_post_forward_hook_handle", "_pre_forward_hook_handle", "_register_root_post_backward_final_callback"),
        *("_state_ctx", "_states_to_backward_prefetch", "_states_to_forward_prefetch", "_training_state"),
    ),
    f"{_FSDP}._fsdp_state.FSDPStateContext": (
        *("all_states", "iter_forward_root", "post_backward_final_callback_queued"),
    ),
    f"{_FSDP}._fsdp_param_group.FSDPCommContext": ("all_gather_state", "post_forward_order"),
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": (
        *("_all_gather_comm", "_all_gather_process_group", "_all_gather_result", "_all_reduce_hook"),
        *("_all_reduce_process_group", "_module_fqn", "_partial_reduce_output", "_reduce_dtype"),
        *("_reduce_scatter_comm", "_reduce_scatter_process_group", "_reshard_after_forward"),
        *("_reshard_after_forward_event", "_sharded_state", "_to_sharded", "_training_state"),
        *("_use_post_forward_mesh", "_with_fqn", "all_reduce_grads", "device", "finalize_backward"),
        *("force_sum_reduction_for_comms", "fsdp_params", "gradient_divide_factor", "is_unsharded", "mesh_info"),
        *("modules", "post_backward", "post_forward_mesh_info", "reduce_grads", "reshard", "reshard_after_backward"),
        *("unshard", "unshard_in_backward", "wait_for_unshard"),
    ),
    f"{_FSDP}._fsdp_param.FSDPParam": (
        *("_contiguous_orig_stride", "_module_info", "_orig_size", "_param_fqn", "_sharded_local_tensor"),
        *("_sharded_param_data", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
        *("_unsharded_param", "all_gather_inputs", "all_gather_outputs", "contiguous_sharded_post_forward_stride"),
        *("contiguous_sharded_stride", "device", "free_unsharded_param", "fsdp_placement", "init_all_gather_outputs"),
        *("init_unsharded_param", "is_dtensor", "mesh_info", "mp_policy", "offload_to_cpu", "orig_dtype"),
        *("padded_sharded_param_size", "param_dtype", "post_forward_mesh_info", "shard_mesh", "sharded_param"),
        *("sharded_post_forward_size", "sharded_size", "sharded_state", "to_sharded_dtensor"),
        *("to_sharded_post_forward_dtensor",),
    ),
    f"{_FSDP}._fsdp_param.ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
    f"{_FSDP}._fsdp_common.FSDPMeshInfo": ("shard_mesh_rank", "shard_mesh_size", "shard_process_group"),
    "torch.nn.Module": ("_call_impl", "_forward_hooks", "_forward_pre_hooks", "_parameters"),
    "torch.Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks"),
}


def check_version(version: str) -> None:
    """Refuse a torch that is too old or too new.

    Raises:
        ImportError: it is neither of these releases nor between them.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        (oldest, newest), (major, minor) = (f"{a}.{b}" for a, b in (OLDEST, NEWEST)), NEWEST
        raise ImportError(
            f"compile_fsdp works with torch {oldest} to {newest}, found torch {version}; install one of these, with "
            f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
        )


def moved(error: Exception) -> ImportError:
    """What to raise where `compat.py` cannot be imported."""
    return ImportError(
        f"compile_fsdp uses a private name of torch that torch {torch.__version__} does not have: {error}; install "
        "torch 2.13.0, which it was checked with, and report it"
    )


def check_attributes(attributes: Mapping[str, tuple[str, ...]] = ATTRIBUTES) -> None:
    """Look for names that objects must have, in their classes.

    Raises:
        AttributeError: some class has none of that name, and none of its methods sets it.
    """
    for path, names in attributes.items():
        cls = _look_up(path)
        if (left := set(names) - set(dir(cls))) and (gone := left - set(_set_by_methods(cls))):
            raise AttributeError(f"{path} has no {', '.join(sorted(gone))}")


def _set_by_methods(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        yield from vars(base).get("__annotations__", ())
        for member in vars(base).values():
            function = inspect.unwrap(getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield from (each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR")


# Once for each name: every graph asks for all of them again.
_look_up = cache(resolve_name)


def check_names() -> None:
    """Look all names up that are used later. It imports the compiler, so this is done before the first graph.

    Raises:
        ImportError: one has moved.
    """
    for name in USED_LATER:
        try:
            _look_up(name)
        except (ImportError, AttributeError) as error:
            raise moved(error) from error


check_version(torch.__version__)
try:
    importlib.import_module("compile_fsdp.compat")
    check_attributes()
except (ImportError, AttributeError) as error:
    raise moved(error) from error
