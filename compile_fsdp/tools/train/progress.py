"""Show the progress of a run on the first rank: as a bar on a terminal, as occasional lines in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LINES_PER_RUN = 20  # most progress lines in a log


class ProgressView(Protocol):
    """Shows one run; the run tells it what happens."""

    def phase(self, text: str) -> None:
        """Show what the current step is busy with."""

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Show the figures of the last of `done` steps."""


class SilentView:
    """Shows nothing, for all ranks but the first."""

    def phase(self, text: str) -> None:
        pass

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        pass


class BarView:
    """A bar that redraws itself, for terminals."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress = progress
        self.task = task

    def phase(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        figures = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        self.progress.update(self.task, completed=done, figures=figures)


class LineView:
    """Plain lines, for output that goes to a file or a pipe."""

    def __init__(self, console: Console, first: int, total: int) -> None:
        self.console = console
        self.first = first
        self.total = total
        self.every = max(1, (total - first) // LINES_PER_RUN)
        self.shown = ""

    def phase(self, text: str) -> None:
        if text != self.shown:
            self.console.print(f"{text} ...")
        self.shown = text

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        if done == self.first + 1 or done % self.every == 0 or done == self.total:
            self.console.print(f"step {done}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s")


@contextmanager
def show_progress(console: Console, first: int, total: int) -> Iterator[ProgressView]:
    """A view of steps `first` to `total` on `console`; shows nothing if the console is quiet."""
    if console.quiet:
        yield SilentView()
    elif not console.is_terminal:
        yield LineView(console, first, total)
    else:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, expand=True) as progress:
            task = progress.add_task("starting", total=total, completed=first, figures="")
            yield BarView(progress, task)
            progress.update(task, description="done")
