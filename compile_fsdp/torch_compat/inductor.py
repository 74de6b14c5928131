"""Inductor and AOTAutograd: options, partitioners, lowerings, caches, descriptors of graph inputs and outputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch._functorch.config
from torch._inductor import custom_graph_pass

from compile_fsdp.torch_compat.declarations import Late, needs
from compile_fsdp.torch_compat.dispatch import OpOverload

# Base classes of a pass and of a partitioner. Inductor caches a graph only if its pass and partitioner derive from
# them. (2.13.0)
CustomGraphPass = custom_graph_pass.CustomGraphPass
CustomPartitionerFn = custom_graph_pass.CustomPartitionerFn

# The settings of AOTAutograd. (2.13.0)
functorch_config = torch._functorch.config

# Inductor's option that lists, by full name, the functions that a cached graph may call. (2.13.0)
CACHEABLE_FUNCTIONS = "unsafe_marked_cacheable_functions"

# Key in node.meta under which Inductor's pattern matcher numbers the regions between mutations. It renumbers the graph
# if the first node lacks the key. (2.13.0)
MUTATION_REGION_KEY = "mutation_region_id"

# Names of Inductor's options, and the options of a mode of `torch.compile`; RuntimeError for an unknown mode. (2.13.0)
inductor_option_names: Callable[[], Collection[str]] = Late("torch._inductor.list_options")
inductor_mode_options: Callable[[str], dict[str, Any]] = Late("torch._inductor.list_mode_options")

# Its value: whether Inductor's global config captures CUDA graphs. (2.13.0)
cuda_graphs_by_default = Late("torch._inductor.config.triton.cudagraphs")

# Its value: whether the compilers' caches are disabled, as by TORCHINDUCTOR_FORCE_DISABLE_CACHES. (2.13.0)
caches_disabled = Late("torch._inductor.config.force_disable_caches")

# The command of Inductor's C++ compiler; RuntimeError or OSError if no compiler starts. (2.13.0)
cpp_compiler: Callable[[], str] = Late("torch._inductor.cpp_builder.get_cpp_compiler")

# Choose the vector instructions of C++ kernels, by probes that a cache folder keeps. (2.13.0)
pick_vec_isa = Late("torch._inductor.cpu_vec_isa.pick_vec_isa")

# Its value: the class of Inductor's compiled graphs, which AOTAutograd's cache stores. (2.13.0)
output_code = Late("torch._inductor.output_code.OutputCode")

# Its value: Inductor's lowerings by op. (2.13.0)
inductor_lowerings = Late("torch._inductor.lowering.lowerings")

# Partition a joint graph with Inductor's default choice of saved tensors. (2.13.0)
min_cut_partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = Late(
    "torch._functorch.partitioners.min_cut_rematerialization_partition"
)

_inductor_hash = Late("torch._inductor.config.get_hash")
_cache_dir = Late("torch._inductor.runtime.cache_dir_utils.cache_dir")
_compile_fx = Late("torch._inductor.compile_fx.compile_fx")
_compile_fx_inner = Late("torch._inductor.compile_fx.compile_fx_inner")
_aot_autograd = Late("torch._dynamo.backends.common.aot_autograd")
_custom_pre_pass = Late("torch._inductor.config.post_grad_custom_pre_pass")
_reorders_for_locality = Late("torch._inductor.config.reorder_for_locality")
_reorder_for_locality = Late("torch._inductor.fx_passes.post_grad.reorder_for_locality")
_boxed_nop = Late("torch._dynamo.backends.debugging.boxed_nop")
_default_op_list = functools.cache(Late("torch._functorch.partitioners.get_default_op_list"))
_decomposed = functools.cache(Late("torch._inductor.decomposition.select_decomp_table"))
_plain_output = Late("torch._functorch._aot_autograd.descriptors.PlainAOTOutput")
_first_unsafe = Late("torch._inductor.utils.get_first_incompatible_cudagraph_node")
_saved_outputs = (
    Late("torch._functorch._aot_autograd.descriptors.SavedForBackwardsAOTOutput"),
    Late("torch._functorch._aot_autograd.descriptors.SavedForBackwardsNoVcCheckAOTOutput"),
)
_register_lowering = Late("torch._inductor.lowering.register_lowering")
_add_layout_constraint = Late("torch._inductor.lowering.add_layout_constraint")
_constrain_to_fx_strides = Late("torch._inductor.lowering.constrain_to_fx_strides")
_create_collective = Late("torch._inductor.ir._CollectiveKernel.create_out_of_place")
_create_tensor_box = Late("torch._inductor.ir.TensorBox.create")
_inductor_graph = Late("torch._inductor.virtualized.V")
_custom_codegen = Late("torch._inductor.codegen.custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN")
_CustomCodegen = Late("torch._inductor.codegen.custom_extern_kernel_codegen.CustomCodegen")
_deserialize = Late("torch._functorch._aot_autograd.aot_autograd_result.deserialize_bundled_cache_entry")
_flatten_graph_inputs = Late("torch._dynamo.utils.flatten_graph_inputs")


def cache_folder() -> Path:
    """Inductor's cache folder: TORCHINDUCTOR_CACHE_DIR or this user's default. (2.13.0)"""
    return Path(_cache_dir())


_generates_code = True


def generates_code() -> bool:
    """Whether this is outside of `without_code`."""
    return _generates_code


def inductor_compilers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inductor's compilers of a Dynamo graph and of each graph that AOTAutograd derives from it. (2.13.0)"""
    return _compile_fx.value, _compile_fx_inner.value if _generates_code else _run_custom_passes


@contextmanager
def without_code() -> Iterator[None]:
    """Generate no code inside the block: graphs run op by op after `post_grad_custom_pre_pass`."""
    global _generates_code
    outer, _generates_code = _generates_code, False
    try:
        yield
    finally:
        _generates_code = outer


def _run_custom_passes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    if kwargs.get("is_inference") and _reorders_for_locality.value:  # as Inductor does before the custom pass
        _reorder_for_locality(gm.graph)
    _custom_pre_pass.value(gm.graph)
    gm.recompile()
    return _boxed_nop(gm, list(example_inputs))


def compile_op_by_op(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Callable[..., Any],
    compiler: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compile with torch's backend aot_eager and a given partitioner of the joint graph. (2.11.0, 2.13.0)

    `compiler` takes the partitioned graphs in place of aot_eager's.
    """
    compiler = compiler or _boxed_nop.value
    backend = _aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, keep_inference_input_mutations=True
    )
    return cast(Callable[..., Any], backend(gm, list(example_inputs)))


def is_fused(op: OpOverload) -> bool:
    """Whether AOTAutograd's partitioner assumes that an op fuses with its users. (2.13.0)"""
    return op.overloadpacket in cast(Collection[Any], _default_op_list().fusible_ops)


def is_decomposed(op: OpOverload) -> bool:
    """Whether Inductor decomposes an op into pointwise ops and reductions. (2.13.0)"""
    return op in _decomposed() and "scaled_dot_product" not in str(op)


def graph_input_position(node: torch.fx.Node) -> int | None:
    """The Dynamo graph's input position for an Inductor graph's placeholder; None if there is none. (2.13.0)"""
    return getattr(node.meta.get("desc"), "idx", None)


def graph_output_positions(output: torch.fx.Node) -> list[int | None]:
    """(outputs of Inductor's graph,) positions among the Dynamo graph's outputs; None for extra outputs. (2.13.0)"""
    plain = _plain_output.value
    return [each.idx if isinstance(each, plain) else None for each in output.meta.get("desc") or ()]


def graph_saved_outputs(output: torch.fx.Node) -> frozenset[int]:
    """Positions of the outputs of Inductor's graph that only its backward reads. (2.13.0)"""
    saved = tuple(each.value for each in _saved_outputs)
    return frozenset(i for i, each in enumerate(output.meta.get("desc") or ()) if isinstance(each, saved))


def is_whole(graph: torch.fx.Graph) -> bool:
    """Whether AOTAutograd made the graph; else it is the body of an op, such as a condition, in a graph. (2.13.0)"""
    # Not by the output, which the partitioner makes anew for states of random numbers.
    inputs = graph.find_nodes(op="placeholder")
    return not inputs or any("desc" in node.meta for node in inputs)


def is_unsafe_in_graphs(node: torch.fx.Node) -> bool:
    """Whether Inductor would capture no graph with this node. (2.13.0)

    Such a node waits for the device, or the size of its result depends on values.
    """
    return _first_unsafe(SimpleNamespace(graph=SimpleNamespace(nodes=[node]))) is not None


def copy_cache_key(source: Any, target: Any) -> None:
    """Give `target` the AOTAutograd cache key of the compiled graph `source`. (2.13.0)"""
    for name in ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr"):
        setattr(target, name, getattr(source, name, None))


def register_collective_lowering(op: OpOverload) -> None:
    """Lower an op that starts a collective as Inductor lowers the functional collectives. (2.13.0)

    Inductor then leaves the send and receive buffers unchanged until the wait.
    """
    _add_layout_constraint(op, _constrain_to_fx_strides.value)
    register = _register_lowering(op, type_promotion_kind=None)
    register(lambda *args: _create_tensor_box(_create_collective(op, *args)))


def hand_over_inputs(op: OpOverload, function: str) -> None:
    """Let generated code call an op as a function of a module, and drop the inputs that nothing reads later.

    The op takes tensors, sizes and a constant. The function takes the tensors as a list that no variable shares, so
    that it can free each tensor when it has read it. (2.11.0, 2.13.0)
    """
    module, name = function.rsplit(".", 1)

    def generate(node: Any, write: Callable[[str], None]) -> None:
        graph: Any = _inductor_graph.value.graph
        tensors, *others = node.codegen_args()
        graph.wrapper_code.add_import_once(f"from {module} import {name}")
        write(f"handed_over = {tensors}")
        for each in graph.scheduler.current_node.last_usage:
            if re.search(rf"\b{each}\b", tensors):
                graph.never_reuse_buffers.add(each)
                write(f"{each} = None")
        write(f"{node.get_name()} = {name}(handed_over, {', '.join(others)})")

    _custom_codegen.value[f"torch.ops.{op}"] = _CustomCodegen(python=generate)


@needs("torch._guards.tracing", "torch._guards.TracingContext")
@contextmanager
def separate_trace(examples: Sequence[Any]) -> Iterator[None]:
    """Compile a graph with these inputs inside the block apart from the graph that is being compiled. (2.13.0)"""
    fake_mode = next(cast(Any, each).fake_mode for each in examples if isinstance(each, torch.Tensor))
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def innermost(compiled: Any) -> Callable[[list[Any]], Any]:
    """The generated code in a result of `compile_fx` for a graph without autograd, mutation and aliasing. (2.13.0)

    It takes its inputs as one list, and empties the list.
    """
    while not isinstance(compiled, output_code.value):
        compiled = compiled.__wrapped__
    return cast(Callable[[list[Any]], Any], compiled)


def stored_graph(compiled: Any) -> Callable[[], Any] | None:
    """A function that serializes a result of `compile_fx` into a picklable object. (2.13.0)

    None unless the graph was compiled with AOTAutograd's setting `bundled_autograd_cache`.
    """
    return cast("Callable[[], Any] | None", getattr(compiled, "serialize", None))


def load_graph(stored: Any) -> Callable[[list[Any]], Any]:
    """Load a serialized compiled graph. It takes its inputs as one list, and empties the list. (2.13.0)"""
    return cast(Callable[[list[Any]], Any], _deserialize(stored).__wrapped__)


def compile_flat(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], compile_graph: Callable[..., Any]
) -> tuple[Callable[..., Any], Any]:
    """Compile a graph that has a list among its inputs. (2.13.0)

    Returns a callable that takes the graph's inputs, and `compile_graph`'s result, which takes list items as inputs.
    """
    inner: list[Any] = []

    def compile_inner(flat_gm: torch.fx.GraphModule, flat_inputs: Sequence[Any]) -> Any:
        inner.append(compile_graph(flat_gm, flat_inputs))
        return inner[0]

    return _flatten_graph_inputs(gm, inputs, compile_inner), inner[0]


def settings_hash() -> str:
    """Hash the settings of AOTAutograd and Inductor that a compiled graph depends on. (2.13.0)

    Dynamo's settings are left out, because their hash depends on set order and differs in each process.
    """
    return f"{cast(Any, functorch_config).get_hash().hex()} {_inductor_hash().hex()}"
