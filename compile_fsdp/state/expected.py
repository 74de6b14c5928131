"""Determine the state that an optimizer keeps for a parameter, and compare a saved state, before anything changes.

[Note: A twin takes the step]
Only an optimizer's step shows which entries it keeps for a parameter, and their dtypes and sharding. A twin takes this
step: an object with the optimizer's class and attributes, but with a single group that holds only a zero-filled copy of
the parameter. The twin runs the class's `step`, without hooks, profiler or learning rate scheduler. If the step fails
(it needs a closure, or DTensor does not support its arithmetic), unknown entries are accepted unchecked; and so they
are if the optimizer holds further ones, as ZeroRedundancyOptimizer does, whose own steps the twin would take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compile_fsdp.errors import StateMismatchError
from compile_fsdp.state.containers import leaves
from compile_fsdp.state.layout import TensorSpec, is_plain
from compile_fsdp.state.ranks import gather
from compile_fsdp.torch_compat.nn import unhooked_step

OTHER_OPTIONS = "saved with other options than the rest of its group"
_KINDS = ("missing", "unexpected", "wrong shape", "wrong dtype", OTHER_OPTIONS)


@dataclass(frozen=True, slots=True)
class Expected:
    """The state entries that an optimizer keeps for a parameter."""

    entries: dict[str, TensorSpec | None]  # layout by name; None for an entry that is not a tensor
    required: frozenset[str]  # names of the entries that the optimizer makes in its first step
    is_complete: bool  # whether the twin's step succeeded, so that an entry not in `entries` is unexpected
    # New tensors of the optimizer's own classes, by entry, such as torchao's quantized ones; a load fills them.
    rooms: Mapping[str, Tensor] = field(default_factory=dict)


def unwrapped(optim: Optimizer) -> Optimizer:
    """The optimizer that accelerate or Lightning Fabric has wrapped; any other optimizer itself."""
    while isinstance(inner := getattr(optim, "optimizer", None), Optimizer) and inner.state is optim.state:
        optim = inner
    return optim


class Probe:
    """Finds an optimizer's state entries; parameters of equal group, layout and device share a trial step."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self._known: dict[tuple[int, TensorSpec, torch.device], Expected] = {}

    def expected(self, parameter: nn.Parameter, number: int, options: dict[str, Any]) -> Expected:
        """The entries of a parameter in the group `number`. Collective if the optimizer's arithmetic is."""
        key = (number, TensorSpec.of(parameter), parameter.device)
        known = self._known.get(key)
        if known is None or known.rooms:  # each parameter has rooms of its own
            known = self._known[key] = self._ask(parameter, options)
        present = describe(self.optim.state.get(parameter, {}))
        return replace(known, entries={**present, **known.entries})

    def _ask(self, parameter: nn.Parameter, options: dict[str, Any]) -> Expected:
        if _holds_another(self.optim):
            return Expected({}, frozenset(), is_complete=False)
        twin: Any = object.__new__(type(self.optim))
        twin.__dict__.update(self.optim.__dict__)
        twin.state = defaultdict(dict)
        is_complete = True
        on_host = parameter.device.type in ("cpu", "meta")
        devices, kind = ([], "cuda") if on_host else ([parameter.device], parameter.device.type)
        with torch.random.fork_rng(devices, device_type=kind):  # the step may draw random numbers
            copy: nn.Parameter | None = None
            try:
                copy = nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
                copy.grad = torch.zeros_like(copy, requires_grad=False)
                twin.param_groups = [{**options, "params": [copy]}]
                unhooked_step(self.optim)(twin)
            except Exception:
                is_complete = False
        state = twin.state.get(copy, {})
        entries = describe(state)
        tensors = {name: leaf for name, leaf in leaves(state) if isinstance(leaf, Tensor)}
        rooms = {name: leaf for name, leaf in tensors.items() if not is_plain(leaf)}
        return Expected(entries, frozenset(entries), is_complete, rooms)


def _holds_another(optim: Optimizer) -> bool:
    """Whether an attribute of an optimizer is a further optimizer, or a list, tuple or dict of some."""
    held = vars(optim).values()
    containers = (each for each in held if isinstance(each, (dict, list, tuple)))
    several = (each.values() if isinstance(each, dict) else each for each in containers)
    return any(isinstance(each, Optimizer) for each in chain(held, *several))


def describe(state: Any) -> dict[str, TensorSpec | None]:
    """Layout of each entry of a parameter's state, by name; None for an entry that is not a tensor."""
    return {name: TensorSpec.of(leaf) if isinstance(leaf, Tensor) else None for name, leaf in leaves(state)}


class Differences:
    """Differences between the entries of a state, named `source` in errors, and the expected entries, by FQN."""

    def __init__(self, source: str, strict: bool) -> None:
        self.strict = strict
        self._source = source
        self._found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._foreign: set[str] = set()

    def add_foreign(self, names: Iterable[str]) -> None:
        """Add names of the source that this rank's model lacks; unexpected if every rank's does."""
        self._foreign.update(names)

    def add(self, kind: str, name: str) -> None:
        if self.strict or kind not in ("missing", "unexpected"):
            self._found[kind].append(name)

    def compare(self, name: str, expected: TensorSpec | None, got: TensorSpec | None) -> None:
        """Compare the expected and the actual entry of a name; None stands for an entry that is not a tensor."""
        # A number in place of a 0-dim tensor is no difference: older optimizers stored their step counts as numbers.
        if expected == got or (expected is not None and got is None and not expected.shape):
            return
        if expected is None or got is None:
            self.add("wrong shape", f"{name} (expected {_text(expected)}, got {_text(got)})")
        elif expected.shape != got.shape:
            self.add("wrong shape", f"{name} (expected {list(expected.shape)}, got {list(got.shape)})")
        elif expected.dtype != got.dtype:
            self.add("wrong dtype", f"{name} (expected {expected.dtype}, got {got.dtype})")

    def compare_state(self, fqn: str, expected: Expected, got: Mapping[str, TensorSpec | None]) -> None:
        """Compare a parameter's optimizer state entry by entry."""
        for name in expected.required - got.keys():
            self.add("missing", f"{fqn}: {name}")
        for name, spec in got.items():
            if name in expected.entries:
                self.compare(f"{fqn}: {name}", expected.entries[name], spec)
            elif expected.is_complete:
                self.add("unexpected", f"{fqn}: {name}")

    def raise_together(self) -> None:
        """Raise on all ranks if any rank has found differences; the error lists all of them. Collective."""
        everywhere, foreign = zip(*gather((self._found, self._foreign)), strict=True)
        by_kind = {kind: sorted({name for found in everywhere for name in found[kind]}) for kind in _KINDS}
        if self.strict:  # ranks have different parameters in stages of a pipeline
            by_kind["unexpected"] = sorted({*by_kind["unexpected"], *set.intersection(*foreign)})
        if found := "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items() if names):
            raise StateMismatchError(
                f"expected {self._source} to fit the model and its optimizer, got {found}. Nothing was changed; load "
                "into the model and optimizer that it was saved from, or load only the common entries with strict=False"
            )


def _text(spec: TensorSpec | None) -> str:
    return "no tensor" if spec is None else f"a tensor of shape {list(spec.shape)}"
