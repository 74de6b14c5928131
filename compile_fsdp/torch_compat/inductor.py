"""Inductor and AOTAutograd, which makes Inductor's graphs of Dynamo's: lowerings, options, caches, descriptors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch._inductor import custom_graph_pass

from compile_fsdp.torch_compat.declarations import needs
from compile_fsdp.torch_compat.dispatch import OpOverload

# The classes that Inductor wants for a pass, and for a partitioner, whose graphs it may cache. (2.13.0)
CustomGraphPass = custom_graph_pass.CustomGraphPass
CustomPartitionerFn = custom_graph_pass.CustomPartitionerFn

# The settings of AOTAutograd. (2.13.0)
functorch_config = torch._functorch.config

# Inductor's option with the functions, by full name, that a graph may call and still be cached. (2.13.0)
CACHEABLE_FUNCTIONS = "unsafe_marked_cacheable_functions"

# Key in node.meta under which Inductor's pattern matcher numbers the stretches between mutations; it numbers
# the graph again where the first node lacks it. (2.13.0)
MUTATION_REGION_KEY = "mutation_region_id"


@needs("torch._inductor.list_options")
def inductor_option_names() -> frozenset[str]:
    """Names that `torch.compile(options=...)` accepts for Inductor. (2.13.0)"""
    from torch._inductor import list_options

    return frozenset(list_options())


@needs("torch._inductor.list_mode_options")
def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options behind a mode of `torch.compile(mode=...)`; RuntimeError if there is none. (2.13.0)"""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


@needs("torch._inductor.config.triton.cudagraphs")
def cuda_graphs_by_default() -> bool:
    """Whether Inductor captures CUDA graphs unless its options say otherwise. (2.13.0)"""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


@needs("torch._inductor.runtime.cache_dir_utils.cache_dir")
def cache_folder() -> Path:
    """Inductor's, for this user or as TORCHINDUCTOR_CACHE_DIR has it. (2.13.0)"""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@needs("torch._inductor.cpp_builder.get_cpp_compiler")
def cpp_compiler() -> str:
    """The command of the C++ compiler that Inductor takes; RuntimeError or OSError if none starts. (2.13.0)"""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


@needs("torch._inductor.compile_fx.compile_fx", "torch._inductor.compile_fx.compile_fx_inner")
def inductor_compilers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inductor for a Dynamo graph, and for each of the graphs that AOTAutograd makes of that. (2.13.0)"""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx, compile_fx_inner


@needs("torch._functorch.partitioners.min_cut_rematerialization_partition")
def min_cut_partition(
    gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Inductor's own choice of what the forward saves for the backward. (2.13.0)"""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


@needs("torch._dynamo.backends.common.aot_autograd", "torch._dynamo.backends.debugging.boxed_nop")
def compile_op_by_op(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """torch's backend aot_eager, with a choice of what the forward saves for the backward. (2.11.0, 2.13.0)"""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return backend(gm, list(example_inputs))


def is_fused(op: OpOverload) -> bool:
    """Whether AOTAutograd's partitioner takes an op for one that is computed together with what reads it. (2.13.0)"""
    return op.overloadpacket in _fusible_packets()


def is_decomposed(op: OpOverload) -> bool:
    """Whether Inductor makes an op of pointwise ops and reductions. (2.13.0)"""
    return op in _decomposed() and "scaled_dot_product" not in str(op)


@needs("torch._functorch.partitioners.get_default_op_list")
@functools.cache
def _fusible_packets() -> Collection[Any]:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().fusible_ops


@needs("torch._inductor.decomposition.select_decomp_table")
@functools.cache
def _decomposed() -> Collection[Any]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def graph_input_position(node: torch.fx.Node) -> int | None:
    """The position, among the inputs of the Dynamo graph, of a placeholder of Inductor's graph. (2.13.0)"""
    return getattr(node.meta.get("desc"), "idx", None)


def graph_output_positions(output: torch.fx.Node) -> list[int | None]:
    """By result of Inductor's graph, its position among those of the Dynamo graph. (2.13.0)"""
    return [getattr(each, "idx", None) for each in output.meta.get("desc") or ()]


@needs("torch._inductor.output_code.OutputCode")
def inductor_output_type() -> Any:
    """The class of what Inductor compiles a graph to, which AOTAutograd's cache stores. (2.13.0)"""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def copy_cache_key(source: Any, target: Any) -> None:
    """Let AOTAutograd's cache refer to a compiled graph as if it was another one. (2.13.0)"""
    for name in ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr"):
        setattr(target, name, getattr(source, name, None))


@needs("torch._inductor.lowering.lowerings")
def inductor_lowerings() -> Mapping[Any, Callable[..., object]]:
    """Inductor's table of lowerings, by op. (2.13.0)"""
    from torch._inductor.lowering import lowerings

    return lowerings


@needs("torch._inductor.lowering.register_lowering")
def register_inductor_lowering(op: OpOverload, lowering: Callable[..., object]) -> None:
    """Add a lowering that gets its arguments as they are, not promoted to one dtype. (2.13.0)"""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lowering)


@needs(
    "torch._inductor.ir.TensorBox.create",
    "torch._inductor.ir._CollectiveKernel.create_out_of_place",
    "torch._inductor.lowering.add_layout_constraint",
    "torch._inductor.lowering.constrain_to_fx_strides",
)
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


def stored_graph(compiled: Any) -> Callable[[], Any] | None:
    """Who makes an object that can be pickled of what `compile_fx` returns; None if nobody does. (2.13.0)

    Within `bundled_autograd_cache` of AOTAutograd's settings there is someone.
    """
    store: Callable[[], Any] | None = getattr(compiled, "serialize", None)
    return store


@needs("torch._functorch._aot_autograd.aot_autograd_result.deserialize_bundled_cache_entry")
def load_graph(stored: Any) -> Callable[[list[Any]], Any]:
    """The compiled graph, which takes its inputs as a list that it empties. (2.13.0)"""
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    compiled: Any = deserialize_bundled_cache_entry(stored)
    loaded: Callable[[list[Any]], Any] = compiled.__wrapped__
    return loaded


@needs("torch._dynamo.utils.flatten_graph_inputs")
def compile_flat(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], compile_graph: Callable[..., Any]
) -> tuple[Callable[..., Any], Any]:
    """Compile a graph of which an input is a list. (2.13.0)

    Returns:
        What takes the graph's inputs, and what `compile_graph` has made, which takes the items one by one.
    """
    from torch._dynamo.utils import flatten_graph_inputs

    inner: list[Any] = []

    def compile_inner(flat_gm: torch.fx.GraphModule, flat_inputs: Sequence[Any]) -> Any:
        inner.append(compile_graph(flat_gm, flat_inputs))
        return inner[0]

    return flatten_graph_inputs(gm, inputs, compile_inner), inner[0]


@needs("torch._inductor.config.get_hash")
def settings_hash() -> str:
    """Changes with the settings of AOTAutograd and Inductor that a compiled graph depends on. (2.13.0)

    Dynamo's hash is another one in each process, for the order of its sets.
    """
    from torch._inductor import config

    aot_autograd: Any = functorch_config
    return f"{aot_autograd.get_hash().hex()} {config.get_hash().hex()}"
