"""FX passes over graphs that carry FSDP2's unsharded parameters."""

from compile_fsdp.passes.expand_calls import expand_calls
from compile_fsdp.passes.legalize_windows import legalize_windows
from compile_fsdp.passes.pipeline import PASSES, Pipeline
from compile_fsdp.passes.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.passes.report import Kept, LegalizeReport, PassReport, Unmoved

__all__ = [
    "PASSES",
    "Kept",
    "LegalizeReport",
    "PassReport",
    "Pipeline",
    "Unmoved",
    "expand_calls",
    "legalize_windows",
    "remove_unshard_copies",
]
