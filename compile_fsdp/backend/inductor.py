"""Inductor's options for one graph: passes, caches and the partitioner."""

from __future__ import annotations

from typing import Any

from compile_fsdp.backend.derived_backward import Partitioner
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.recorder import Recorder
from compile_fsdp.backend.step import Step
from compile_fsdp.ops import accumulate_gradient, ensure_lowerings, run_block, watch
from compile_fsdp.passes import GraphObserver, Pipeline, pipelines
from compile_fsdp.passes.cache_key import cache_key
from compile_fsdp.passes.post_grad.packing import Merge
from compile_fsdp.reports import Direction
from compile_fsdp.torch_compat.inductor import CACHEABLE_FUNCTIONS, is_whole


def inductor_config(
    step: Step,
    direction: Direction,
    inputs: GraphInputs,
    recorder: Recorder,
    observer: GraphObserver | None,
    backward_is_captured: bool,
) -> dict[str, Any]:
    """Return Inductor's options: the user's, with additions that run the passes.

    `backward_is_captured` tells whether the graph's backward, if any, runs under compiled autograd only.
    """
    ensure_lowerings()
    options, decision = step.options, step.decision
    config = dict(options.inductor)
    config.setdefault("reorder_for_peak_memory", False)  # see [Note: Who keeps the order]
    if observer is not None or options.verify:
        # No pass runs on a graph from Inductor's cache; AOTAutograd's cache follows this setting. Compiled C++ and
        # Triton may come from a cache, because `force_disable_caches` compiles all of it again, and leaves a new folder
        # for each graph.
        config |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    merge = Merge.SMALL
    if decision is not None:
        merge = Merge.ALL if decision.has_large_packs else Merge.NONE
    costs, replayed = options.costs, options.cuda_graphs
    passes = pipelines.post_grad(inputs.name, hoist=direction == "forward", merge=merge, costs=costs, replayed=replayed)
    config["post_grad_custom_pre_pass"] = Pipeline(
        passes, recorder, options.disabled_passes, observer=observer, check=options.verify, applies=is_whole
    )
    ours = {f"{each.__module__}.{each.__name__}": cache_key() for each in (watch, accumulate_gradient, run_block)}
    config[CACHEABLE_FUNCTIONS] = {**config.get(CACHEABLE_FUNCTIONS, {}), **ours}
    if direction == "forward" and (backward_is_captured or decision is not None):
        decided = (decision.recomputed, decision.offloaded) if decision is not None else ()
        config["custom_partitioner_fn"] = Partitioner(config.get("custom_partitioner_fn"), decided)
    return config
