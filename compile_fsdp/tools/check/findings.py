"""Findings of `check`, and their report as text for people and as data for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from compile_fsdp.passes.text import count, fill
from compile_fsdp.tools.check.models import ShardedModel
from compile_fsdp.tools.explain.capture import Place


class Level(str, Enum):
    """Severity of a finding."""

    BREAKS = "breaks"  # the step does not compile whole
    COSTS = "costs"  # the step compiles whole, but takes more time or memory than it needs
    NOTE = "note"  # a remark about the run


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    rule: str  # name of the kind of finding; stable across scripts and versions
    what: str  # description of the finding, in a sentence
    remedy: str  # change that the user should make
    place: Place | None = None  # None if no single line of the user's code causes the finding
    names: tuple[str, ...] = ()  # FQNs of the modules or parameters that the finding is about


@dataclass(frozen=True, slots=True)
class CheckReport:
    script: str  # path
    world_size: int
    steps: int  # of the optimizer with the most steps
    models: tuple[ShardedModel, ...]
    windows_removed: int  # by the passes, from the script's graphs
    windows_kept: int
    findings: tuple[Finding, ...]  # by level: breaks first, then costs, then notes

    @property
    def compiles_whole(self) -> bool:
        return all(finding.level is not Level.BREAKS for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, ready for `json.dumps`."""
        head = {"compiles_whole": self.compiles_whole, "torch_version": torch.__version__}
        return {**head, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = "compiles whole" if self.compiles_whole else "does not compile whole"
        yield f"{self.script} on {self.world_size} ranks, {count(self.steps, 'step')}: {verdict}"
        for model in self.models:
            forward, backward = model.forward_graphs, model.backward_graphs
            yield (
                f"  {model.name}: {count(len(model.groups), 'group')}, {count(forward, 'forward graph')}, "
                f"{count(backward, 'backward graph')}"
            )
        if self.windows_removed or self.windows_kept:
            yield f"  copies of gathers: {count(self.windows_removed, 'window')} removed, {self.windows_kept} kept"
        for finding in self.findings:
            where = f"  {finding.place.filename}:{finding.place.line}" if finding.place is not None else ""
            yield f"\n{finding.level.value}  {finding.rule}{where}"
            if finding.place is not None and finding.place.source:
                yield f"    > {finding.place.source}"
            yield fill(finding.what, "    ", "    ")
            yield fill(f"Change: {finding.remedy}", "    ", "      ")
