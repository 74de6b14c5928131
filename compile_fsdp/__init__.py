"""Train FSDP2 models under torch.compile as one forward and one backward graph."""

import compile_fsdp.torch_compat.required as _required  # noqa: F401  # first: it refuses unsupported versions of torch
from compile_fsdp.api import fully_shard, make_traceable
from compile_fsdp.options import Options
from compile_fsdp.reports import GraphReport, reports, reset_reports
from compile_fsdp.tools.explain import explain

__all__ = ["GraphReport", "Options", "explain", "fully_shard", "make_traceable", "reports", "reset_reports"]
