"""`compile-fsdp check`: run a user's script for a few steps and report whether it compiles whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import torch.distributed as dist

from compile_fsdp.errors import ScriptError
from compile_fsdp.tools.check.failures import explain_failure, report_error
from compile_fsdp.tools.check.findings import CheckReport, Level
from compile_fsdp.tools.check.models import describe_models, find_modules
from compile_fsdp.tools.check.rules import Seen, find
from compile_fsdp.tools.explain.capture import capture
from compile_fsdp.tools.protect_files import protected_files
from compile_fsdp.tools.scripts import add_script, add_world, check_output, ended_after, run_script, world

DESCRIPTION = """\
Run a training script for two steps and say whether it compiles whole: which line breaks the graph and why, which
modules are in no graph, which parameters stay unsharded, which graphs were recompiled, and which settings are costly,
with a remedy for each. Without torchrun, the process is one rank of a world of any size whose collectives do nothing;
under torchrun, the ranks are real, and rank 0 writes. The script's own writes do not reach its files.
"""

EPILOG = """\
Exit status: 0 if the script compiles whole, 1 if it does not, 2 if the script itself failed or could not be run.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--strict", action="store_true", help="also exit with 1 for costly settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings")
    add_world(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script, report on rank 0, and return the exit status."""
    check_output(args.json)
    with world(args.world) as (rank, world_size), protected_files("check", args.script):
        report = check_script(args.script, args.args, args.steps, world_size)
    if rank == 0:
        print(report)
        if args.json is not None:
            args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    levels = {finding.level for finding in report.findings}
    return int(Level.BREAKS in levels or (args.strict and Level.COSTS in levels))


def check_script(script: Path, arguments: Sequence[str], steps: int, world_size: int) -> CheckReport:
    """Run a script in the present world for some optimizer steps and report the findings."""
    earlier_modules = WeakSet(find_modules())
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
        models = describe_models(modules, captured.traced, captured.models)
    del names, modules
    finding = None
    if failed is not None:
        settings = (model.settings for model in models if not model.is_captured)
        has_other_backend = any(each is not None and each.backend != "compile_fsdp" for each in settings)
        if (finding := explain_failure(failed, has_other_backend)) is None:
            raise report_error(failed, script) from failed
    if dist.is_initialized():
        dist.destroy_process_group()
    return CheckReport(
        script=str(script),
        world_size=world_size,
        steps=made.made,
        models=models,
        windows_removed=sum(report.windows_removed for report in captured.reports),
        # A window that the forward leaves open is at the start of the backward, too.
        windows_kept=sum(reason != "open at start" for report in captured.reports for _, reason in report.kept),
        findings=find(Seen(captured, models, made.made, finding)),
    )
