"""Estimate memory and communication of a sharded model before it runs, as formulas in the number of ranks."""

from compile_fsdp.tools.planning.estimates import Estimate, Optimizer, estimate
from compile_fsdp.tools.planning.schedule import Backend

__all__ = ["Backend", "Estimate", "Optimizer", "estimate"]
