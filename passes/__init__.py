"""FX passes over graphs that carry FSDP2's unsharded parameters."""

from compile_fsdp.passes.analysis.costs import COSTS, Costs
from compile_fsdp.passes.dynamo.expand_group_calls import expand_group_calls
from compile_fsdp.passes.dynamo.legalize_windows import legalize_windows
from compile_fsdp.passes.dynamo.save_frozen_outputs import save_frozen_outputs
from compile_fsdp.passes.pipelines import PASSES
from compile_fsdp.passes.post_grad.pack_gathers import pack_gathers
from compile_fsdp.passes.post_grad.pack_reductions import pack_reductions
from compile_fsdp.passes.post_grad.read_by_strides import read_by_strides
from compile_fsdp.passes.post_grad.remove_unread import remove_unread
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.passes.post_grad.replace_unsafe_gathers import replace_unsafe_gathers
from compile_fsdp.passes.post_grad.schedule_collectives import schedule_collectives
from compile_fsdp.passes.report import Kept, LegalizeReport, PassCounts, Unmoved, WindowReport
from compile_fsdp.passes.runner import GraphObserver, Pipeline

__all__ = [
    "COSTS",
    "PASSES",
    "Costs",
    "GraphObserver",
    "Kept",
    "LegalizeReport",
    "PassCounts",
    "Pipeline",
    "Unmoved",
    "WindowReport",
    "expand_group_calls",
    "legalize_windows",
    "pack_gathers",
    "pack_reductions",
    "read_by_strides",
    "remove_unread",
    "remove_unshard_copies",
    "replace_unsafe_gathers",
    "save_frozen_outputs",
    "schedule_collectives",
]
