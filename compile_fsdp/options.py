"""Parse and check the options of the backend.

[Note: CUDA graphs of our own]
Inductor does not capture a graph whose inputs are written or move, or captures it again for every new address: FSDP
with `mode="reduce-overhead"` was captured 40 to 144 times in one run (pytorch issue 183451). So Inductor is told not to
capture, and `backend/device_graphs.py` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp.backend.agreement import DEFAULT_LIMIT_S
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.passes import PASSES, Costs
from compile_fsdp.passes.text import list_names, parse_bytes
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from compile_fsdp.torch_compat.inductor import (
    caches_disabled,
    cuda_graphs_by_default,
    inductor_mode_options,
    inductor_option_names,
)

# The environment variable that sets a job's default for the option `costs`.
COSTS_VARIABLE = "COMPILE_FSDP_COSTS"

# Not allowed as inner backends: this backend, and torch's that captures CUDA graphs by itself.
_NO_INNER_BACKENDS = ("compile_fsdp", "cudagraphs")


@dataclass(frozen=True, slots=True)
class Options:
    """The options that `torch.compile(..., backend="compile_fsdp", options={...})` takes.

    Attributes:
        inner_backend: The registered Dynamo backend that compiles both graphs. "inductor" runs the passes and generates
            code; "aot_eager" runs the traced graphs op by op, for bitwise comparisons.
        disabled_passes: Names of passes that do not run, see docs/passes.md.
        backward_prefetch: When the backward gathers the next module's parameters, as in FullyShardedDataParallel:
            before the current module's gradients (BACKWARD_PRE, the default, as in eager FSDP2), after them
            (BACKWARD_POST), or when the backward reaches the next module (None). A member of
            torch.distributed.fsdp.BackwardPrefetch or its name. A module's set_modules_to_backward_prefetch overrides
            which modules are gathered.
        memory_budget: Most bytes that a forward and its backward may allocate above the sharded state, on any rank:
            unsharded parameters, buffers of collectives, activations, gradients. A string such as "24GiB" is parsed;
            "auto" means the device's free memory less a reserve. Parameters and activations that fit stay in memory;
            the rest are gathered again or recomputed: docs/passes.md. With None, only `reshard_after_forward` and the
            user's checkpoints decide.
        costs: Costs by which the passes decide, equal on all ranks; or the path of a file that `compile-fsdp calibrate`
            wrote, which is read at once. None: the file named by the environment variable COMPILE_FSDP_COSTS, else
            the device's costs in `compile_fsdp.passes.COSTS`.
        progress: Whether rank 0 reports on stderr each trace or compilation that takes more than two seconds.
        agreement_timeout_s: Seconds that a rank waits for other ranks to compile before a graph first runs.
        verify: Whether to compare each compiled graph with its traced graph on the first run, compare the first step's
            gradients with eager FSDP2's, and check each graph after every pass. For debugging: the first step takes
            several times the memory.
        bundle: Path of a file with the traced and compiled steps of a model that its `compile` method has compiled, for
            processes that start later: docs/performance.md. None: a file of this package's choice beside Inductor's
            caches, unless they are disabled. False: no file.
        inductor: Options of Inductor, by their names in `torch.compile(options=...)`.
        cuda_graphs: Whether Inductor's option `triton.cudagraphs`, a mode or a setting asks for CUDA graphs.
    """

    inner_backend: str = "inductor"
    disabled_passes: frozenset[str] = frozenset()
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    memory_budget: int | Literal["auto"] | None = None
    costs: Costs | None = None
    progress: bool = True
    agreement_timeout_s: float = DEFAULT_LIMIT_S
    verify: bool = False
    bundle: str | Literal[False] | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    cuda_graphs: bool = False

    @property
    def keeps_steps(self) -> bool:
        """Whether a model compiled with these options reads and writes a bundle."""
        if self.bundle is not None:
            return self.bundle is not False
        # "auto" asks for a new decision by the memory that is free now.
        is_plain = self.inner_backend == "inductor" and not self.verify and self.memory_budget != "auto"
        is_plain = is_plain and not self.cuda_graphs  # captures belong to a process
        return CAN_REPLAY and is_plain and not caches_disabled.value

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Split the user's dict into our options and Inductor's.

        Args:
            given: Options by name.
            mode: A mode of `torch.compile`, whose Inductor options `given` overrides; None for no mode.
        Raises:
            UnknownOptionError: a name is neither our option nor Inductor's, a value has the wrong type, or an option
                excludes the CUDA graphs that a different one asks for.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {"inductor", "cuda_graphs"}
        ours = {name: value for name, value in (given or {}).items() if name in own}
        others = {name: value for name, value in (given or {}).items() if name not in own}
        if (name := "post_grad_custom_pre_pass") in others:
            raise UnknownOptionError(f"expected no {name}: that is where the passes of compile_fsdp run")
        inductor = {**(inductor_mode_options(mode) if mode is not None else {}), **others}
        known_to_inductor = inductor_option_names()
        if unknown := [name for name in others if name.replace("-", "_") not in known_to_inductor]:
            near = {name: get_close_matches(name, [*own, *known_to_inductor], 1) for name in unknown}
            hints = [f"{found[0]} in place of {name}" for name, found in near.items() if found]
            raise UnknownOptionError(
                f"expected options {sorted(own)} or Inductor's own (torch._inductor.list_options()), got {unknown}"
                + (f"; did you mean {', '.join(hints)}?" if hints else "")
            )
        _check(ours)
        if cuda_graphs := bool(inductor.get("triton.cudagraphs", cuda_graphs_by_default.value)):
            _check_cuda_graphs(ours)
            inductor["triton.cudagraphs"] = False  # see [Note: CUDA graphs of our own]
        return cls(**ours, inductor=inductor, cuda_graphs=cuda_graphs)


def _check_cuda_graphs(ours: Mapping[str, Any]) -> None:
    excluded = "bundle", "disabled_passes", "memory_budget", "verify"
    names = [name for name in excluded if ours.get(name)]
    if ours.get("inner_backend", "inductor") != "inductor":
        names.append("inner_backend")
    if names:
        raise UnknownOptionError(
            f"expected no option {list_names(names)} together with CUDA graphs, which a mode, an option or a setting "
            "asks for (reduce-overhead, max-autotune, triton.cudagraphs); leave one of them out, or use "
            'mode="max-autotune-no-cudagraphs"'
        )


def _read_costs(given: object) -> Costs | None:
    where = "costs"
    if given is None and COSTS_VARIABLE in os.environ:
        given, where = os.environ[COSTS_VARIABLE], f"the environment variable {COSTS_VARIABLE}"
    if given is None or isinstance(given, Costs):
        return given
    wanted = f"expected {where} to be the path of a file that compile-fsdp calibrate wrote, or a compile_fsdp.Costs"
    if not isinstance(given, (str, os.PathLike)):
        raise UnknownOptionError(f"{wanted}, got {given!r}")
    try:
        costs = Costs(**json.loads(Path(given).read_text()))
        if not all(isinstance(number, (int, float)) for number in dataclasses.astuple(costs)):
            raise ValueError("a value is no number")
        return costs
    except (OSError, ValueError, TypeError) as error:
        raise UnknownOptionError(f"{wanted}, got {os.fspath(given)!r}: {error}") from error


def _check(ours: dict[str, Any]) -> None:
    """Check our options, and parse them in place."""
    backends = [each for each in torch.compiler.list_backends(exclude_tags=()) if each not in _NO_INNER_BACKENDS]
    backend = ours.get("inner_backend", "inductor")
    if backend not in backends:
        raise UnknownOptionError(f"expected inner_backend to be one of {backends}, got {backend!r}")
    prefetch = ours.get("backward_prefetch")
    if isinstance(prefetch, str) and prefetch in BackwardPrefetch.__members__:
        ours["backward_prefetch"] = BackwardPrefetch[prefetch]
    elif not (prefetch is None or isinstance(prefetch, BackwardPrefetch)):
        names = list(BackwardPrefetch.__members__)
        raise UnknownOptionError(f"expected backward_prefetch to be one of {names} or None, got {prefetch!r}")
    budget = ours.get("memory_budget")
    if isinstance(budget, str) and budget != "auto":
        try:
            ours["memory_budget"] = budget = parse_bytes(budget)
        except ValueError as error:
            raise UnknownOptionError(f'expected memory_budget to be "auto" or {error}') from None
    if not (budget in (None, "auto") or (type(budget) is int and budget >= 0)):
        raise UnknownOptionError(
            f'expected memory_budget to be a number of bytes, a size such as "24GiB", "auto" or None, got {budget!r}'
        )
    ours["costs"] = _read_costs(ours.get("costs"))
    for name in ("progress", "verify"):
        if not isinstance(value := ours.get(name, True), bool):
            raise UnknownOptionError(f"expected {name} to be True or False, got {value!r}")
    limit = ours.get("agreement_timeout_s", 1.0)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
        raise UnknownOptionError(
            f"expected agreement_timeout_s to be a finite number of seconds above 0, got {limit!r}"
        )
    bundle = ours.get("bundle")
    if isinstance(bundle, os.PathLike):
        ours["bundle"] = os.fspath(bundle)
    elif not (bundle is None or bundle is False or isinstance(bundle, str)):
        raise UnknownOptionError(f"expected bundle to be the path of a file, False or None, got {bundle!r}")
    if bundle and (ours.get("verify") or backend != "inductor"):
        raise UnknownOptionError("expected no bundle together with verify=True or an inner_backend other than inductor")
    if bundle and not CAN_REPLAY:
        raise UnknownOptionError(f"expected torch 2.13 or later for a bundle, got {torch.__version__}")
    if "disabled_passes" in ours:
        passes = {p.__name__ for p in PASSES}
        disabled = ours["disabled_passes"]
        if isinstance(disabled, str) or not set(disabled) <= passes:
            raise UnknownOptionError(f"expected disabled_passes to be a set of {sorted(passes)}, got {disabled!r}")
        ours["disabled_passes"] = frozenset(disabled)
