"""FX passes over graphs that carry FSDP2's unsharded parameters."""

from compile_fsdp.passes.costs import COSTS, Costs
from compile_fsdp.passes.exchange_pairs import exchange_pairs
from compile_fsdp.passes.expand_calls import expand_calls
from compile_fsdp.passes.keep_unsharded import keep_unsharded
from compile_fsdp.passes.legalize_windows import legalize_windows
from compile_fsdp.passes.pack_gathers import pack_gathers
from compile_fsdp.passes.pack_reductions import pack_reductions
from compile_fsdp.passes.pipeline import PASSES, GraphObserver, Pipeline
from compile_fsdp.passes.remove_unread import remove_unread
from compile_fsdp.passes.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.passes.report import CountReport, Kept, LegalizeReport, PassReport, Unmoved
from compile_fsdp.passes.save_frozen_outputs import save_frozen_outputs
from compile_fsdp.passes.schedule_collectives import schedule_collectives

__all__ = [
    "COSTS",
    "PASSES",
    "Costs",
    "CountReport",
    "GraphObserver",
    "Kept",
    "LegalizeReport",
    "PassReport",
    "Pipeline",
    "Unmoved",
    "exchange_pairs",
    "expand_calls",
    "keep_unsharded",
    "legalize_windows",
    "pack_gathers",
    "pack_reductions",
    "remove_unread",
    "remove_unshard_copies",
    "save_frozen_outputs",
    "schedule_collectives",
]
