"""The figures of a run: the summary table, summary.json and the loss curve."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

import compile_fsdp
from compile_fsdp.reports import count_captures, newest_advice
from compile_fsdp.torch_compat.dynamo import dynamo_counters, last_compilations

SMOOTHED_SHARE = 0.05  # share of all steps in the drawn running mean; summary.json has the losses as measured


@dataclass(slots=True)
class StepTimes:
    """Seconds of cold steps, which compile or come first, and of all other steps, the warm ones."""

    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, is_cold: bool) -> None:
        (self.cold_s if is_cold else self.warm_s).append(seconds)


@dataclass(frozen=True, slots=True)
class CompileFigures:
    """What was compiled and what the passes removed, summed over all graphs of the run."""

    forward_graphs: int = 0
    backward_graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    windows_removed: int = 0
    copies_removed: int = 0
    resizes_removed: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    kept: tuple[tuple[str, str], ...] = ()
    """(parameter FQN, reason) of every window that the passes left."""
    advice: tuple[str, ...] = ()
    """What would gain more, by an estimate, in a sentence each."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """What Dynamo has done in this process so far."""

    graph_breaks: int
    recompiles: int  # among the compilations that Dynamo remembers
    captures: int  # graphs that Dynamo or compiled autograd traced

    @classmethod
    def now(cls) -> _Counts:
        counters = dynamo_counters()
        return cls(
            graph_breaks=sum(counters["graph_break"].values()),
            recompiles=sum(each.recompile_reason is not None for each in last_compilations()),
            captures=count_captures(),
        )


class CompileCounter:
    """Counts what is compiled after the counter was created."""

    def __init__(self) -> None:
        compile_fsdp.reset_reports()
        self.start = _Counts.now()
        self.seen = self.start.captures

    def has_compiled(self) -> bool:
        """Whether anything was compiled since the last call of this method."""
        before, self.seen = self.seen, _Counts.now().captures
        return self.seen != before

    def result(self) -> CompileFigures:
        now = _Counts.now()
        graphs = compile_fsdp.reports()
        directions = Counter(graph.direction for graph in graphs)
        return CompileFigures(
            forward_graphs=directions["forward"],
            backward_graphs=directions["backward"],
            graph_breaks=now.graph_breaks - self.start.graph_breaks,
            recompiles=now.recompiles - self.start.recompiles,
            windows_removed=sum(graph.windows_removed for graph in graphs),
            copies_removed=sum(graph.copies_removed for graph in graphs),
            resizes_removed=sum(graph.resizes_removed for graph in graphs),
            nodes_before=sum(graph.nodes_before for graph in graphs),
            nodes_after=sum(graph.nodes_after for graph in graphs),
            kept=tuple(kept for graph in graphs for kept in graph.kept),
            advice=tuple(each.sentence for each in newest_advice()),
        )


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Everything that is reported at the end of a run."""

    mode: str
    world_size: int
    device: str
    parameters: int
    first_step: int
    """Number of steps done before this run, by the run that it resumes."""
    losses: tuple[float, ...]
    """Mean loss over the ranks of every step since the start of training, in nats per byte."""
    tokens_per_step: int
    """Tokens per step over all ranks."""
    cold_step_s: tuple[float, ...]
    warm_step_s: tuple[float, ...]
    compiled: CompileFigures
    peak_memory_bytes: int
    """Peak memory of the rank that used most, in bytes."""

    @property
    def steps_run(self) -> int:
        return len(self.losses) - self.first_step

    def rows(self) -> list[tuple[str, str]]:
        """The summary as (name, text) pairs."""
        if self.steps_run == 0:
            return [("steps", f"none: {len(self.losses)} were done already; ask for more with --steps")]
        first, last = self.losses[self.first_step], self.losses[-1]
        rows = [
            ("steps", f"{self.steps_run} ({self.first_step} to {len(self.losses)})"),
            ("loss", f"{first:.4f} -> {last:.4f} nats per byte"),
            *(self.compile_rows() if self.mode == "compile" else []),
            ("cold steps", f"{len(self.cold_step_s)}, {sum(self.cold_step_s):.1f} s in all"),
        ]
        if self.warm_step_s:
            middle = median(self.warm_step_s)
            low, high = min(self.warm_step_s), max(self.warm_step_s)
            spread = f"min {low * 1e3:.1f}, max {high * 1e3:.1f}, steps {len(self.warm_step_s)}"
            rows.append(("warm step time", f"median {middle * 1e3:.1f} ms ({spread})"))
            rows.append(("throughput", f"{self.tokens_per_step / middle:,.0f} tokens/s over {self.ranks}"))
        on_cpu = self.device == "cpu"
        meaning = "peak RSS of the whole process" if on_cpu else "allocated on the GPU in warm steps"
        rows.append(("peak memory", f"{self.peak_memory_bytes / 2**20:,.0f} MiB per rank ({meaning})"))
        return rows

    def compile_rows(self) -> list[tuple[str, str]]:
        made = self.compiled
        reasons = Counter(reason for _, reason in made.kept)
        listed = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        removed = (
            f"{made.copies_removed} copies and {made.resizes_removed} resizes of {made.windows_removed} "
            f"windows; {made.nodes_before} -> {made.nodes_after} nodes"
        )
        return [
            ("graphs", f"{made.forward_graphs} forward, {made.backward_graphs} backward"),
            ("graph breaks", str(made.graph_breaks)),
            ("recompiles", str(made.recompiles)),
            ("ops removed", removed),
            ("windows kept", f"{len(made.kept)} ({listed})" if made.kept else "0"),
            ("gained", "not measured here: compare the step time with that of --mode eager"),
            *(("to gain more", sentence) for sentence in made.advice),
        ]

    @property
    def ranks(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"


def print_summary(summary: RunSummary, console: Console) -> None:
    table = Table(title="Summary", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary.rows():
        table.add_row(name, text)
    console.print(table)


def write_outputs(summary: RunSummary, folder: Path) -> list[Path]:
    """Write summary.json and loss.png into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "summary.json"
    figures.write_text(json.dumps(asdict(summary), indent=1) + "\n")
    curve = folder / "loss.png"
    draw_losses(summary).savefig(curve, dpi=120)
    return [figures, curve]


def draw_losses(summary: RunSummary) -> Figure:
    """Draw the loss of every step, with its running mean."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(summary.losses) + 1)
    axes.plot(steps, summary.losses, color="tab:blue", alpha=0.5, linewidth=1, label="each step")
    if (window := round(SMOOTHED_SHARE * len(steps))) > 1:
        smooth = running_mean(summary.losses, window)
        axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of the last {window}")
    if summary.first_step > 0:
        axes.axvline(summary.first_step, color="gray", linestyle=":", label="resumed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    millions = summary.parameters / 1e6
    axes.set_title(f"{millions:.1f} M parameters, {summary.ranks}, {summary.device}, mode {summary.mode}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def running_mean(values: tuple[float, ...], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
