"""examples/train.py in which a rank kills itself at a planned moment.

    sabotaged_train.py PLAN RECORD [options of examples/train.py]

PLAN is a JSON list of `Kill`, see `jobs.py`, one for each start by torchrun; later starts have no kill. RECORD gets a
line of JSON for every kill. If PLAN is empty, RECORD gets a line with the seconds of every phase of rank 0.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from helpers.faults.example import load_example


class Saboteur:
    """Tracks this rank's phase and kills it at the planned moment."""

    def __init__(self, plan: list[dict[str, Any]], record: str) -> None:
        self.rank, self.start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        kill = plan[self.start] if self.start < len(plan) else None
        self.kill = kill if kill is not None and kill["rank"] == self.rank else None
        self.is_timing = not plan and self.rank == 0
        self.record = record
        # "compile" (forward and backward of the first step), "forward", "backward", "optimizer", "save", or "" between.
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


def sabotage(train: ModuleType, saboteur: Saboteur) -> None:
    """Tell the saboteur when a phase of the example's steps begins."""
    steps = itertools.count()
    step, backward, save = train.train_step, torch.Tensor.backward, train.save

    def watched_step(*args: Any) -> float:
        saboteur.enter("forward" if next(steps) else "compile")
        return float(step(*args))

    def watched_backward(*args: Any, **kwargs: Any) -> None:
        if saboteur.phase == "forward":
            saboteur.enter("backward")
        backward(*args, **kwargs)

    def watched_save(*args: Any) -> None:
        saboteur.enter("save")
        save(*args)
        saboteur.enter("")

    train.train_step, torch.Tensor.backward, train.save = watched_step, watched_backward, watched_save
    register_optimizer_step_pre_hook(lambda *_: saboteur.enter("optimizer"))
    register_optimizer_step_post_hook(lambda *_: saboteur.enter(""))


if __name__ == "__main__":
    plan_path, record_path = sys.argv[1:3]
    del sys.argv[1:3]
    example = load_example(layers=1, seq_len=16)
    with open(plan_path) as plan_file:
        sabotage(example, Saboteur(json.load(plan_file), record_path))
    example.main()
