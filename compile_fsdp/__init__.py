"""Train FSDP2 models under torch.compile as one forward and one backward graph."""

from pathlib import Path as _Path

if __name__ != "compile_fsdp":
    raise ImportError(f"expected import compile_fsdp, got {__name__}")  # below the path that a checkout adds
if not (_Path(__file__).parent / "passes").exists():
    # In a checkout, passes/ and ops/ are beside this folder; an installed package has them inside.
    __path__.append(str(_Path(__file__).parents[1]))

from compile_fsdp.tools.doctor.asked import is_asked_for as _doctor_is_asked_for

if not _doctor_is_asked_for():  # See [Note: A doctor for a failing import]
    import compile_fsdp.torch_compat.required as _required  # noqa: F401  # first: refuses unsupported torch versions
    from compile_fsdp.api import drop_cuda_graphs, fully_shard, make_traceable
    from compile_fsdp.options import Options
    from compile_fsdp.passes.analysis.costs import Costs
    from compile_fsdp.reports import GraphReport, reports, reset_reports
    from compile_fsdp.tools.explain import explain

__all__ = [
    "Costs",
    "GraphReport",
    "Options",
    "drop_cuda_graphs",
    "explain",
    "fully_shard",
    "make_traceable",
    "reports",
    "reset_reports",
]
