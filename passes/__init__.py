"""FX passes over graphs that carry FSDP2's unsharded parameters."""

from compile_fsdp.passes.analysis.costs import COSTS, Costs
from compile_fsdp.passes.pipelines import PASSES
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
]
