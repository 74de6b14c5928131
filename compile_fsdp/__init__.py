"""Train FSDP2 models under torch.compile as one forward and one backward graph."""

from compile_fsdp import versions as _versions  # noqa: F401  # first: it refuses a torch that does not fit
from compile_fsdp.api import fully_shard, make_traceable
from compile_fsdp.explain import explain
from compile_fsdp.options import Options
from compile_fsdp.reports import GraphReport, reports, reset_reports

__all__ = ["GraphReport", "Options", "explain", "fully_shard", "make_traceable", "reports", "reset_reports"]
