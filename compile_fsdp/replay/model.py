"""Replay a model's steps that were traced before or bundled.

[Note: Replayed steps]
With the option `bundle`, a step of a model is traced as usual, and recorded: the code that runs in place of the model's
frame and its backward, with the conditions under which this code is right. A later step in which all conditions hold
runs this code; any other step goes to Dynamo. The first recorded step is also written to a file. The next process reads
the conditions from this file, finds that they hold, and runs a step that it has never traced.

[Note: All ranks or none]
A rank that traces meets its peers to compare collectives, see `backend/agreement.py`; a rank that replays meets nobody.
So the ranks decide together on a bundle: each rank checks whether it fits, and all ranks use it if it fits on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp.backend.agreement import share_choice
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.this_run import Run, running, see_guards
from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.replay import bundle
from compile_fsdp.replay.backward import BackwardFrame, BackwardRecord
from compile_fsdp.replay.frames import Frame
from compile_fsdp.replay.recording import FrameRecord
from compile_fsdp.replay.stored import StoredStep
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.hooks import prepare_model
from compile_fsdp.runtime.tracing import at_run_time

_log = logging.getLogger("compile_fsdp")

# Most steps of one model, for inputs of different sizes for example. Each call checks them in turn until one fits.
_MOST_STEPS = 4


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A forward of the whole model and its backward, ready to be replayed."""

    forward: Frame
    backward: BackwardFrame


class ModelReplay:
    """Replayable steps of one model. See [Note: Replayed steps]."""

    def __init__(self, options: Options) -> None:
        self.options = options
        # Path of the bundle; None without a bundle, and once a step is written or read.
        self.path = None if options.bundle is None else bundle.locate(options.bundle)
        self.steps: list[ReplayedStep] = []  # the last used first
        self._is_read = self.path is None
        self._facts: Mapping[str, Any] = {}

    @at_run_time
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Call the compiled model, by a replay if a step fits, else by `run`."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        function = module.__dict__["_call_impl"].__func__
        (cell,) = closure = function.__closure__
        arguments = {"self": module, "args": args, "kwargs": kwargs, "__class__": cell.cell_contents}
        if not self._is_read:
            self._is_read = True
            self._read(module, arguments, closure)
        for i, step in enumerate(self.steps):
            if step.forward.fits(arguments):
                self.steps.insert(0, self.steps.pop(i))
                step.forward.runs += 1
                return step.forward.run(module, *args, **kwargs)
        if len(self.steps) == _MOST_STEPS:
            return run(*args, **kwargs)
        frame = FrameRecord(function.__code__, {"L": arguments, "G": function.__globals__}, lambda fact: False)
        with running(Run(observer=frame)):
            output = run(*args, **kwargs)
        if frame.graphs > 0:  # else Dynamo has compiled the step before
            self._note_backward(frame, closure)
        return output

    @at_run_time
    def _note_backward(self, frame: FrameRecord, closure: Sequence[CellType]) -> None:
        if not isinstance(frame.graph, ForwardGraph) or frame.graph.forward.step.hooks is None:
            frame.problem = "there is no graph with a backward whose hooks are known by numbers"
        with self._failures_logged():
            frame.finish()
            frame.graph.forward.step.record.observer = BackwardRecord(partial(self._keep, frame, closure))

    @at_run_time
    def _keep(self, forward: FrameRecord, closure: Sequence[CellType], backward: BackwardRecord) -> None:
        """Add a step whose record is complete."""
        forward.graph.forward.step.record.observer = None
        with self._failures_logged():
            path, self.path = self.path, None
            step = StoredStep.of(forward, backward, with_graphs=path is not None and dist.get_rank() == 0)
            if path is not None and dist.get_rank() == 0:
                try:
                    bundle.write(path, self._facts, step)
                    bundle.note(path, "wrote")
                except OSError as error:
                    _log.warning("the bundle %s cannot be written: %s", path, error)
            assert backward.frame is not None
            known = forward.graph.forward.step.record.known = step.bind_backward(backward.frame.graph)
            self.steps.insert(0, ReplayedStep(step.bind_forward(forward.graph, closure), known))

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log an exception instead of raising it, because the step is right even if its record fails."""
        try:
            yield
        except Exception as error:
            if self.options.bundle is not None:
                _log.warning("no bundle is made, and every process traces this model: %s", error)

    @at_run_time
    def _read(self, module: nn.Module, arguments: Mapping[str, Any], closure: Sequence[CellType]) -> None:
        groups = prepare_model(module_hooks_of(module).hooks)
        self._facts = bundle.make_facts(module, self.options)
        assert self.path is not None
        loaded: ReplayedStep | None = None
        try:
            step, digest = bundle.read(self.path, self._facts)
            loaded, choice = self._load(step, arguments, closure), f"={digest}"
        except NotPortableError as error:
            choice = str(error)
        problem = share_choice(groups, "bundle", choice, self.options.agreement_timeout_s)
        if problem:
            _log.warning("the bundle %s is not used, and made anew: %s", self.path, problem)
        else:
            assert loaded is not None
            bundle.note(self.path, "kept, since it fits:")
            self.path = None
            self.steps.append(loaded)

    def _load(self, step: StoredStep, arguments: Mapping[str, Any], closure: Sequence[CellType]) -> ReplayedStep:
        for frame in (step.forward, step.backward):
            if (changed := frame.sources.changed()) is not None:
                raise NotPortableError(f"the code of {changed} has changed")
        graph, backward = step.load(self.options, arguments["self"])
        forward = step.bind_forward(graph, closure)
        if not forward.fits(arguments):
            raise NotPortableError(str(forward.problem))
        return ReplayedStep(forward, backward)


@at_run_time
def start_replay(arguments: Mapping[str, Any]) -> tuple[ModelReplay | None, dict[str, Any]]:
    """Return a model's replay, None without a bundle, and torch.compile's arguments for tracing the model."""
    given = dict(arguments.get("options") or {})
    given.pop("guard_filter_fn", None)
    options = Options.parse(given, arguments.get("mode"))
    return (None, dict(arguments)) if options.bundle is None else (ModelReplay(options), show_guards(arguments))


def show_guards(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return torch.compile's arguments such that a recorded frame sees all guards."""
    given = dict(arguments.get("options") or {})
    choose = given.pop("guard_filter_fn", None)

    def choose_and_see(entries: Sequence[Any]) -> Sequence[bool]:
        see_guards(entries)
        return [True] * len(entries) if choose is None else choose(entries)

    return {**arguments, "options": {**given, "guard_filter_fn": choose_and_see}}
