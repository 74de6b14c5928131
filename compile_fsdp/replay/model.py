"""Replay a model's steps that were traced before or bundled.

[Note: Replayed steps]
A step of a model is traced as usual, and recorded: the code that runs in place of the model's frame and its backwards,
with the conditions under which this code is right. A later step in which all conditions hold runs this code; any other
step goes to Dynamo. Recorded steps are also written to a file, a bundle, which is written again with each further one.
The next process reads the conditions from this file, finds that they hold, and runs steps that it has never traced.

[Note: All ranks or none]
A rank that traces meets its peers to compare collectives, see `backend/agreement.py`; a rank that replays meets nobody.
So the ranks decide together on a bundle in their first call: all ranks use it if it has the same collectives on all,
and if the same of its steps, or none, fits on all. The file may differ from machine to machine.

[Note: Bundles of one rank]
On CPUs one bundle serves all ranks of a machine, and on GPUs all ranks with the same number of the device. A step that
may depend on its rank is in a bundle of its rank: if its code reads the rank, if the ranks have traced different
graphs, or if its graph has DTensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp.backend.agreement import are_fake, hash_lines, share_choice
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.cpu_probe import start_cpu_probe
from compile_fsdp.backend.step import Step
from compile_fsdp.backend.this_run import Run, running, see_guards
from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.replay import bundle
from compile_fsdp.replay.backward import BackwardFrame, BackwardRecord
from compile_fsdp.replay.frames import Frame, FrameRecord
from compile_fsdp.replay.stored import StoredBackward, StoredStep
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.hooks import prepare_model
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.dynamo import is_disabled
from compile_fsdp.torch_compat.inductor import inductor_mode_options

_log = logging.getLogger("compile_fsdp")

# Most forwards of one model, for inputs of different sizes for example, and most backwards of each, for microbatches
# with and without reductions for example. Each call checks them in turn until one fits.
_MOST_STEPS = 4


class ModelReplay:
    """Replayable steps of one model. See [Note: Replayed steps]."""

    def __init__(self, options: Options, has_bundle: bool = True) -> None:
        """Take the options of the model; without a bundle, its steps are replayed in this process only."""
        self.options = options
        self.steps: list[tuple[Frame, Step]] = []  # each with its forward's frame, the last used first
        self._stored: list[StoredStep] = []  # the same steps, in the order of their traces
        self._is_read = not has_bundle
        self._records = True  # until a step cannot be recorded
        self._path: Path | None = None  # of the bundle; None if it is not written
        self._facts: Mapping[str, str] = {}
        self._is_of_rank = False  # see [Note: Bundles of one rank]
        self._device_index: int | None = None  # of the device that compiled code names; None on a CPU

    @at_run_time
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Call the compiled model, by a replay if a step fits, else by `run`."""
        function = module.__dict__["_call_impl"].__func__
        (cell,) = closure = function.__closure__
        arguments = {"self": module, "args": args, "kwargs": kwargs, "__class__": cell.cell_contents}
        if not self._is_read:
            self._is_read = True
            self._read(module, arguments, closure)
            if not self.steps and self.options.inner_backend == "inductor":
                start_cpu_probe(module_hooks_of(module).hooks.state._device)
        for i, (forward, _) in enumerate(self.steps):
            if forward.fits(arguments):
                self.steps.insert(0, self.steps.pop(i))
                forward.runs += 1
                return forward.run(module, *args, **kwargs)
        if not self._records or len(self._stored) == _MOST_STEPS:
            return run(*args, **kwargs)
        frame = FrameRecord(function.__code__, {"L": arguments, "G": function.__globals__}, lambda fact: False)
        with running(Run(observer=frame)):
            output = run(*args, **kwargs)
        if frame.graphs > 0:  # else Dynamo has compiled the step before
            self._note(frame, closure)
        return output

    @at_run_time
    def release(self) -> None:
        """Hold no tensors of the last steps, such as shards that `model.to()` is about to replace."""
        for forward, step in self.steps:
            backwards = (each for each in step.known if isinstance(each, BackwardFrame))
            for frame in (forward, *(each.frame for each in backwards)):
                frame.release()

    @at_run_time
    def _note(self, frame: FrameRecord, closure: Sequence[CellType]) -> None:
        """Keep a traced forward without gradients, or have it kept behind its first backward."""
        has_backward = torch.is_grad_enabled()
        if not isinstance(frame.graph, ForwardGraph) or (has_backward and frame.graph.forward.step.hooks is None):
            frame.problem = "there is no graph with a backward whose hooks are known by numbers"
        with self._failures_logged():
            frame.finish(with_graph=False)
            if has_backward:
                frame.graph.forward.step.observer = BackwardRecord(partial(self._keep, frame, closure))
            else:
                self._keep(frame, closure, None)

    @at_run_time
    def _keep(self, forward: FrameRecord, closure: Sequence[CellType], backward: BackwardRecord | None) -> None:
        """Add a step whose first backward, if any, is recorded."""
        step: Step = forward.graph.forward.step
        step.observer = None
        with self._failures_logged():
            if forward.sources.may_read_rank or (forward.sources.has_dtensors and self._is_automatic):
                self._use_bundle_of_rank()
            stored = StoredStep.of(forward, self._writes)
            if backward is not None:
                self._add_backward(stored, step, backward)
            self._stored.append(stored)
            self.steps.insert(0, (stored.bind(forward.graph, closure), step))
            self._write()

    @at_run_time
    def _keep_further(self, stored: StoredStep, step: Step, backward: BackwardRecord) -> None:
        """Add a further backward of a step."""
        step.observer = None
        with self._failures_logged():
            self._add_backward(stored, step, backward)
            self._write()

    def _add_backward(self, stored: StoredStep, step: Step, record: BackwardRecord) -> None:
        backward = StoredBackward.of(record, self._writes)
        assert record.frame is not None
        if record.frame.sources.may_read_rank and not self._is_of_rank:
            raise NotPortableError("its backward reads the rank, and its forward does not")
        stored.backwards.append(backward)
        step.known.append(backward.bind(record.frame.graph))
        self._observe_further(stored, step)

    def _observe_further(self, stored: StoredStep, step: Step) -> None:
        if len(stored.backwards) < _MOST_STEPS:
            step.observer = BackwardRecord(partial(self._keep_further, stored, step))

    @property
    def _is_automatic(self) -> bool:
        return not self.options.bundle and bundle.kept_folder() is None

    @property
    def _writes(self) -> bool:
        if self._path is None:
            return False
        if bundle.kept_folder() is not None:
            return True  # the only process
        rank = dist.get_rank()
        if self.options.bundle:  # the first ranks of a job have its first machine's devices
            return rank == (self._device_index or 0)
        # Each machine has its own caches.
        return self._is_of_rank or self._device_index is not None or dist.get_node_local_rank(rank) == 0

    def _use_bundle_of_rank(self) -> None:
        """Write a bundle for this rank only. See [Note: Bundles of one rank]."""
        if self._is_of_rank or self._path is None:
            return
        if not self._is_automatic:
            raise NotPortableError("it reads the rank, and the bundle is for all ranks")
        self._is_of_rank, self._facts = True, _of_rank(self._facts)
        self._path = bundle.locate(None, self._facts)
        self._stored = [step for step in self._stored if step.forward.graph]

    def _write(self) -> None:
        if self._path is not None and self._writes:
            try:
                bundle.write(self._path, self._facts, self._stored)
                bundle.note(self._path, "wrote")
            except OSError as error:
                self._log("the bundle %s cannot be written: %s", self._path, error)
            if not self.options.bundle:
                bundle.remove_oldest()

    def _log(self, message: str, *args: object) -> None:
        """Log a message about a bundle: a warning if the user has asked for the bundle."""
        _log.log(logging.WARNING if self.options.bundle else logging.INFO, message, *args)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log an exception instead of raising it, because the step is right even if its record fails."""
        try:
            yield
        except Exception as error:
            self._records = False
            self._log("a step is not in the bundle, and every process traces it: %s", error)

    @at_run_time
    def _read(self, module: nn.Module, arguments: Mapping[str, Any], closure: Sequence[CellType]) -> None:
        """Read the bundle, and use it if all ranks can. See [Note: All ranks or none]."""
        gathering, others = prepare_model(module_hooks_of(module).hooks)
        if self._is_automatic and are_fake(gathering | others):
            self._records = False
            return
        steps: list[StoredStep] = []
        loaded: list[tuple[Frame, Step]] = []
        fitting: int | None = None
        try:
            self._facts, self._path = self._locate(module)
            steps = bundle.read(self._path, self._facts)
            loaded = self._load(steps, module, closure)
            fitting = next((i for i, (forward, _) in enumerate(loaded) if forward.fits(arguments)), None)
            choice = f"={_hash_collectives(steps)} {fitting}"
        except Exception as error:  # a rank that stops here would leave its peers waiting
            choice = str(error)
        limit_s = self.options.agreement_timeout_s
        problem = share_choice(gathering, "bundle", choice, limit_s)
        # Replicas, and ranks of tensor parallelism, may have different collectives.
        if problem := share_choice(others, "bundle", problem or f"={fitting}", limit_s):
            self._log("the bundle %s is not used, and made anew: %s", self._path, problem)
            return
        assert self._path is not None
        if fitting is None:
            if dist.get_rank() == 0:
                _log.warning("no step in the bundle %s fits: %s", self._path, loaded[-1][0].problem)
            steps, loaded = steps[1 - _MOST_STEPS :], loaded[1 - _MOST_STEPS :]  # the oldest makes room
        else:
            bundle.note(self._path, "kept, since it fits:")
        self._stored, self.steps = steps, loaded
        every = [group for hooks in module_hooks_of(module).hooks.root.all_hooks for group in hooks.groups]
        for stored, (_, step) in zip(steps, loaded, strict=True):
            stored.note_agreed(self.options, every)
            self._observe_further(stored, step)

    def _locate(self, module: nn.Module) -> tuple[dict[str, str], Path]:
        """Return the facts and the path of the bundle: that of this rank if there is one."""
        device, asked = module_hooks_of(module).hooks.state._device, self.options.bundle or None
        self._device_index = device.index
        facts = bundle.make_facts(module, self.options, device)
        if not self._is_automatic:
            return facts, bundle.locate(f"{asked}.{device.index}" if asked and device.index else asked, facts)
        of_rank = _of_rank(facts)
        self._is_of_rank = bundle.locate(None, of_rank).exists()
        chosen = of_rank if self._is_of_rank else facts
        return chosen, bundle.locate(None, chosen)

    def _load(
        self, steps: Sequence[StoredStep], module: nn.Module, closure: Sequence[CellType]
    ) -> list[tuple[Frame, Step]]:
        for frame in (each for step in steps for each in step.frames()):
            if (changed := frame.sources.changed()) is not None:
                raise NotPortableError(f"the code of {changed} has changed")
        graphs = [step.load(self.options, module) for step in steps]
        return [(step.bind(graph, closure), graph.forward.step) for step, graph in zip(steps, graphs, strict=True)]


def _of_rank(facts: Mapping[str, str]) -> dict[str, str]:
    return {**facts, "rank": f"{dist.get_rank()} of {dist.get_world_size()}"}


def _hash_collectives(steps: Sequence[StoredStep]) -> str:
    sequences = [frame.collectives for step in steps for frame in step.frames()]
    return hash_lines([repr(each.lines(each.groups)) for each in sequences])


@at_run_time
def start_replay(arguments: Mapping[str, Any]) -> tuple[ModelReplay | None, dict[str, Any]]:
    """Return a model's replay, None if it keeps no steps, and torch.compile's arguments for tracing the model."""
    given = dict(arguments.get("options") or {})
    given.pop("guard_filter_fn", None)
    options = Options.parse(given, arguments.get("mode"))
    if options.bundle and not bundle.are_kept():
        arguments = {**arguments, "options": {**arguments["options"], "bundle": False}}
    if not options.keeps_steps or not bundle.are_kept() or arguments.get("disable") or is_disabled():
        return None, dict(arguments)
    return ModelReplay(options), show_guards(arguments)


def show_guards(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return torch.compile's arguments such that a recorded frame sees all guards."""
    given = dict(arguments.get("options") or {})
    choose = given.pop("guard_filter_fn", None)
    if not given and (mode := arguments.get("mode")) is not None:  # torch.compile takes a mode or options
        given, arguments = inductor_mode_options(mode), {**arguments, "mode": None}

    def choose_and_see(entries: Sequence[Any]) -> Sequence[bool]:
        see_guards(entries)
        return [True] * len(entries) if choose is None else choose(entries)

    return {**arguments, "options": {**given, "guard_filter_fn": choose_and_see}}
