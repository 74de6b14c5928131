"""Run a script for a few steps and observe its compilation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import torch.distributed as dist

from compile_fsdp.errors import ScriptError
from compile_fsdp.reports import reports
from compile_fsdp.tools.check.failures import explain_failure, print_traceback, script_error
from compile_fsdp.tools.check.models import ShardedModel, describe_models, find_modules
from compile_fsdp.tools.check.report import CheckReport
from compile_fsdp.tools.check.rules import Seen, find
from compile_fsdp.tools.check.steps import ended_after
from compile_fsdp.tools.explain.capture import capture
from compile_fsdp.tools.scripts import run_script


def check_script(script: Path, arguments: Sequence[str], steps: int, world_size: int) -> CheckReport:
    """Run a script in the present world for some optimizer steps and report the findings.

    Raises:
        ScriptError: if the script raises an error that is not about compiling; see also `run_script`.
    """
    earlier_modules, earlier_reports = WeakSet(find_modules()), len(reports())
    failed: Exception | None = None
    names: object = None  # globals of the script, which keep its models alive
    with capture() as captured:
        with ended_after(steps) as made:
            try:
                names = run_script(script, list(arguments))
            except ScriptError:
                raise
            except Exception as error:
                failed = error
        modules = [module for module in find_modules() if module not in earlier_modules]
        models = describe_models(modules, captured.traced)
    del names, modules
    finding = None
    if failed is not None and (finding := explain_failure(failed, _has_other_backend(models))) is None:
        print_traceback(failed)
        raise script_error(failed, script) from failed
    if dist.is_initialized():
        dist.destroy_process_group()
    own = reports()[earlier_reports:]
    return CheckReport(
        script=str(script),
        world_size=world_size,
        steps=made.made,
        models=models,
        windows_removed=sum(report.windows_removed for report in own),
        # A window that the forward leaves open is at the start of the backward, too.
        windows_kept=sum(reason != "open at start" for report in own for _, reason in report.kept),
        findings=find(Seen(captured, models, own, made.made, finding)),
    )


def _has_other_backend(models: Sequence[ShardedModel]) -> bool:
    settings = (model.settings for model in models if not model.is_captured)
    return any(each is not None and each.backend != "compile_fsdp" for each in settings)
