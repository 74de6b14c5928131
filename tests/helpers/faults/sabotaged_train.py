"""`compile-fsdp train` in which a rank kills itself at a planned moment.

    sabotaged_train.py PLAN RECORD train ...

PLAN is a JSON list of `Kill`, see `jobs.py`, one for each start by torchrun; later starts have no kill. RECORD gets a
line of JSON for every kill. If PLAN is empty, RECORD gets a line with the seconds of every phase of rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from compile_fsdp.cli import main
from compile_fsdp.tools.train import loop
from compile_fsdp.tools.train.config import PRESETS, ModelConfig, Preset

# One block, because tracing dominates the time of a start.
PRESETS["tiny"] = Preset(ModelConfig(dim=32, layers=1, heads=2, hidden=64), 16, 2, 3e-3)


class Saboteur:
    """Tracks this rank's phase and kills it at the planned moment.

    Attributes:
        phase: "compile" (forward and backward of the first step), "forward", "backward", "optimizer", "save", or ""
            between them.
    """

    def __init__(self, plan: list[dict[str, Any]], record: str) -> None:
        self.rank, self.start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        kill = plan[self.start] if self.start < len(plan) else None
        self.kill = kill if kill is not None and kill["rank"] == self.rank else None
        self.is_timing = not plan and self.rank == 0
        self.record = record
        self.phase = ""
        self.entered_s = 0.0
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()

    def enter(self, phase: str) -> None:
        with self.lock:
            if self.is_due():
                self.die()  # the phase was shorter than the planned delay
            now = time.monotonic()
            if self.is_timing and self.phase:
                self.write({"phase": self.phase, "seconds": now - self.entered_s})
            self.phase, self.entered_s = phase, now
            self.counts[phase] += 1
            if self.is_due():
                threading.Thread(target=self.wait_and_die, daemon=True).start()

    def is_due(self) -> bool:
        kill = self.kill
        return kill is not None and (self.phase, self.counts[self.phase]) == (kill["phase"], kill["occurrence"])

    def wait_and_die(self) -> None:
        assert self.kill is not None
        time.sleep(self.kill["delay_s"])
        with self.lock:
            self.die()

    def die(self) -> None:
        self.write({"start": self.start, "phase": self.phase, "rank": self.rank})
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, entry: dict[str, Any]) -> None:
        with open(self.record, "a") as file:
            file.write(json.dumps(entry) + "\n")


class WatchedView:
    """Progress view that tells the saboteur every phase except the optimizer's."""

    def __init__(self, view: Any, saboteur: Saboteur) -> None:
        self.view, self.saboteur = view, saboteur

    def phase(self, text: str) -> None:
        present = self.saboteur.phase
        if text == "compiling forward":
            self.saboteur.enter("compile")
        elif text == "training":
            self.saboteur.enter("backward" if present == "forward" else "forward")
        elif text == "saving":
            self.saboteur.enter("save")
        self.view.phase(text)

    def step(self, *figures: Any) -> None:
        self.view.step(*figures)


def sabotage(saboteur: Saboteur) -> None:
    show_progress = loop.show_progress

    @contextmanager
    def watched(*args: Any) -> Iterator[WatchedView]:
        with show_progress(*args) as view:
            yield WatchedView(view, saboteur)
            saboteur.enter("")  # after the last save

    loop.show_progress = watched  # type: ignore[assignment]
    register_optimizer_step_pre_hook(lambda *_: saboteur.enter("optimizer"))
    register_optimizer_step_post_hook(lambda *_: saboteur.enter(""))


if __name__ == "__main__":
    plan_path, record_path, *command = sys.argv[1:]
    with open(plan_path) as plan_file:
        sabotage(Saboteur(json.load(plan_file), record_path))
    sys.exit(main(command))
