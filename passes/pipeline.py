"""The passes in their order, as the one custom pass that Inductor runs before its own post-grad passes."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from torch import fx

from compile_fsdp import ops
from compile_fsdp.compat import CustomGraphPass, trace_artifact
from compile_fsdp.passes.remove_unshard_copies import Names, remove_unshard_copies
from compile_fsdp.passes.report import PassReport

Pass = Callable[[fx.Graph, Names], PassReport]
OnReport = Callable[[tuple[PassReport, ...]], None]

PASSES: tuple[Pass, ...] = (
    # First: while parameters are copied into, every read of one depends on a mutation, and no other pass may
    # move it; afterwards the graph is functional in them.
    remove_unshard_copies,
)

_log = logging.getLogger("compile_fsdp.passes")


class Pipeline(CustomGraphPass):
    """Runs `PASSES` on a post-grad graph. Set it as Inductor's `post_grad_custom_pre_pass`.

    Args:
        names: Parameter FQN of a placeholder. Only reports use it, so it is no part of `uuid()`.
        on_report: Called once per graph, with the reports in the order the passes ran.
        disabled: Names of passes to leave out.
    Raises:
        ValueError: `disabled` names a pass that does not exist.
    """

    def __init__(self, names: Names, on_report: OnReport, disabled: frozenset[str] = frozenset()) -> None:
        known = [p.__name__ for p in PASSES]
        if unknown := sorted(disabled.difference(known)):
            raise ValueError(f"expected disabled passes among {known}, got {unknown}; see docs/passes.md")
        self._names = names
        self._on_report = on_report
        self._disabled = disabled

    def __call__(self, graph: fx.Graph) -> None:
        reports = tuple(_timed(p, graph, self._names) for p in PASSES if p.__name__ not in self._disabled)
        graph.lint()
        for report in reports:
            _log.info("%s", report)
        trace_artifact("compile_fsdp_passes", lambda: _to_json(reports))
        self._on_report(reports)

    def uuid(self) -> str:
        """Changes with any source file of `passes/` and `ops/` and with the options, with nothing else."""
        text = json.dumps({"sources": _hash_sources(), "disabled": sorted(self._disabled)})
        return hashlib.sha256(text.encode()).hexdigest()


def _timed(run: Pass, graph: fx.Graph, names: Names) -> PassReport:
    start = time.perf_counter()
    report = run(graph, names)
    return replace(report, seconds=time.perf_counter() - start)


@functools.cache
def _hash_sources() -> str:
    """The hash of the code that runs; computed once, since the code does not change when a file does."""
    digest = hashlib.sha256()
    for name, folder in (("ops", Path(ops.__path__[0])), ("passes", Path(__file__).parent)):
        for path in sorted(folder.glob("**/*.py")):
            content = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _to_json(reports: tuple[PassReport, ...]) -> str:
    rows = []
    for report in reports:
        row = asdict(report)
        row["kept"] = [{"parameter": name, "reason": reason.value} for name, reason in report.kept]
        rows.append(row)
    return json.dumps(rows)
