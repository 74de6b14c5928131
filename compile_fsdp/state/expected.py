"""Determine the state that an optimizer keeps for a parameter, without changes to either.

[Note: A twin takes the step]
Only an optimizer's step shows which entries it keeps for a parameter, and their dtypes and sharding. A twin takes this
step: an object with the optimizer's class and attributes, but with a single group that holds only a zero-filled copy of
the parameter. The twin runs the class's `step`, without hooks, profiler or learning rate scheduler. If the step fails
(it needs a closure, or DTensor does not support its arithmetic), unknown entries are accepted unchecked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from compile_fsdp.state.containers import leaves
from compile_fsdp.state.layout import TensorSpec
from compile_fsdp.torch_compat.nn import unhooked_step


@dataclass(frozen=True, slots=True)
class Expected:
    """The state entries that an optimizer keeps for a parameter."""

    entries: dict[str, TensorSpec | None]  # layout by name; None for an entry that is not a tensor
    required: frozenset[str]  # names of the entries that the optimizer makes in its first step
    is_complete: bool  # whether the twin's step succeeded, so that an entry not in `entries` is unexpected


class Probe:
    """Finds an optimizer's state entries; parameters of equal group, layout and device share a trial step."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self._known: dict[tuple[int, TensorSpec, torch.device], Expected] = {}

    def expected(self, parameter: nn.Parameter, number: int, options: dict[str, Any]) -> Expected:
        """The entries of a parameter in the group `number`. Collective if the optimizer's arithmetic is."""
        key = (number, TensorSpec.of(parameter), parameter.device)
        if key not in self._known:
            self._known[key] = self._ask(parameter, options)
        known = self._known[key]
        present = describe(self.optim.state.get(parameter, {}))
        return Expected({**present, **known.entries}, known.required, known.is_complete)

    def _ask(self, parameter: nn.Parameter, options: dict[str, Any]) -> Expected:
        twin: Any = object.__new__(type(self.optim))
        twin.__dict__.update(self.optim.__dict__)
        twin.state = defaultdict(dict)
        is_complete = True
        on_host = parameter.device.type in ("cpu", "meta")
        devices, kind = ([], "cuda") if on_host else ([parameter.device], parameter.device.type)
        with torch.random.fork_rng(devices, device_type=kind):  # the step may draw random numbers
            try:
                copy = nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
                copy.grad = torch.zeros_like(copy, requires_grad=False)
                twin.param_groups = [{**options, "params": [copy]}]
                unhooked_step(self.optim)(twin)
            except Exception:
                is_complete = False
        (kept,) = [*twin.state.values()] or [{}]
        return Expected(describe(kept), frozenset(describe(kept)), is_complete)


def describe(state: Any) -> dict[str, TensorSpec | None]:
    """Layout of each entry of a parameter's state, by name; None for an entry that is not a tensor."""
    return {name: TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else None for name, leaf in leaves(state)}
