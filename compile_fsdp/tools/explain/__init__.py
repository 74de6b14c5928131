"""Explain how a step was compiled: `explain` for a model, `compile-fsdp explain` for a script."""

from compile_fsdp.tools.explain.report import Report
from compile_fsdp.tools.explain.run import explain

__all__ = ["Report", "explain"]
