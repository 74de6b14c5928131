"""FX passes over graphs that carry FSDP2's unsharded parameters."""

from compile_fsdp.passes.analysis.costs import COSTS, Costs
from compile_fsdp.passes.pipelines import PASSES
from compile_fsdp.passes.report import Kept, PassCounts, WindowReport
from compile_fsdp.passes.runner import GraphObserver, Pipeline

__all__ = ["COSTS", "PASSES", "Costs", "GraphObserver", "Kept", "PassCounts", "Pipeline", "WindowReport"]
