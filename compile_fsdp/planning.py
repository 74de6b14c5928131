"""Estimate memory and communication of a sharded model before it runs. See docs/planning.md."""

from compile_fsdp.tools.planning import Backend, Estimate, Optimizer, estimate

__all__ = ["Backend", "Estimate", "Optimizer", "estimate"]
