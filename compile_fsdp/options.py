"""The options of the backend, checked and typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compile_fsdp.compat import inductor_mode_options, inductor_option_names, list_backends
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.passes import PASSES


@dataclass(frozen=True, slots=True)
class Options:
    """What `torch.compile(..., backend="compile_fsdp", options={...})` takes.

    Attributes:
        inner_backend: The registered Dynamo backend that compiles both graphs: "inductor" runs the passes and
            generates code, "aot_eager" runs the traced graphs op by op, for bitwise comparisons.
        disabled_passes: Names of passes to leave out, see docs/passes.md.
        inductor: Options of Inductor, by the names that `torch.compile(options=...)` knows.
    """

    inner_backend: str = "inductor"
    disabled_passes: frozenset[str] = frozenset()
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Sort the user's dict into our options and Inductor's; those of Inductor's `mode` come first.

        Raises:
            UnknownOptionError: a name is neither, or a value has the wrong type; the valid ones are listed.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {"inductor"}
        ours: dict[str, Any] = {}
        inductor = inductor_mode_options(mode) if mode is not None else {}
        unknown = []
        known_to_inductor = inductor_option_names()
        for name, value in (given or {}).items():
            if name in own:
                ours[name] = value
            elif name == "post_grad_custom_pre_pass":
                raise UnknownOptionError(f"expected no {name}: that is where the passes of compile_fsdp run")
            elif name.replace("-", "_") in known_to_inductor:
                inductor[name] = value
            else:
                unknown.append(name)
        if unknown:
            raise UnknownOptionError(
                f"expected options {sorted(own)} or Inductor's own (torch._inductor.list_options()), got {unknown}"
            )
        return cls(**_checked(ours), inductor=inductor)


def _checked(ours: dict[str, Any]) -> dict[str, Any]:
    backend = ours.get("inner_backend", "inductor")
    if backend not in (valid := list_backends()) or backend == "compile_fsdp":
        raise UnknownOptionError(
            f"expected inner_backend to be one of {[b for b in valid if b != 'compile_fsdp']}, got {backend!r}"
        )
    if "disabled_passes" in ours:
        names = {p.__name__ for p in PASSES}
        disabled = ours["disabled_passes"]
        if isinstance(disabled, str) or not set(disabled) <= names:
            raise UnknownOptionError(f"expected disabled_passes to be a set of {sorted(names)}, got {disabled!r}")
        ours = {**ours, "disabled_passes": frozenset(disabled)}
    return ours
