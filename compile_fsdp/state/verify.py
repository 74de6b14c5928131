"""Compare a state with the entries that a model and an optimizer expect, before either changes."""

from __future__ import annotations

from collections.abc import Mapping

from compile_fsdp.errors import StateMismatchError
from compile_fsdp.state.expected import Expected
from compile_fsdp.state.layout import TensorSpec
from compile_fsdp.state.ranks import gather

_KINDS = ("missing", "unexpected", "wrong shape", "wrong dtype", "saved with other options than the rest of its group")


class Differences:
    """Differences between the entries of a state, named `source` in errors, and the expected entries, by FQN."""

    def __init__(self, source: str, strict: bool) -> None:
        self.strict = strict
        self._source = source
        self._found: list[str] = []  # the index of a kind in _KINDS, and a name

    def missing(self, name: str) -> None:
        if self.strict:
            self._found.append(f"0{name}")

    def unexpected(self, name: str) -> None:
        if self.strict:
            self._found.append(f"1{name}")

    def other_options(self, name: str) -> None:
        self._found.append(f"4{name}")

    def compare(self, name: str, expected: TensorSpec | None, got: TensorSpec | None) -> None:
        """Compare the expected and the actual entry of a name; None stands for an entry that is not a tensor."""
        # A number in place of a 0-dim tensor is no difference: older optimizers stored their step counts as numbers.
        if expected == got or (expected is not None and got is None and not expected.shape):
            return
        if expected is None or got is None:
            self._found.append(f"2{name} (expected {_text(expected)}, got {_text(got)})")
        elif expected.shape != got.shape:
            self._found.append(f"2{name} (expected {list(expected.shape)}, got {list(got.shape)})")
        elif expected.dtype != got.dtype:
            self._found.append(f"3{name} (expected {expected.dtype}, got {got.dtype})")

    def compare_state(self, fqn: str, expected: Expected, got: Mapping[str, TensorSpec | None]) -> None:
        """Compare a parameter's optimizer state entry by entry."""
        for name in expected.required - got.keys():
            self.missing(f"{fqn}: {name}")
        for name, spec in got.items():
            if name in expected.entries:
                self.compare(f"{fqn}: {name}", expected.entries[name], spec)
            elif expected.is_complete:
                self.unexpected(f"{fqn}: {name}")

    def raise_together(self) -> None:
        """Raise on all ranks if any rank has found differences; the error lists all of them. Collective."""
        by_kind: dict[int, list[str]] = {}
        for text in sorted({text for found_there in gather(self._found) for text in found_there}):
            by_kind.setdefault(int(text[0]), []).append(text[1:])
        if not by_kind:
            return
        found = "; ".join(f"{_KINDS[kind]}: {', '.join(texts)}" for kind, texts in sorted(by_kind.items()))
        raise StateMismatchError(
            f"expected {self._source} to fit the model and its optimizer, got {found}. Nothing was changed; load into "
            "the model and optimizer that it was saved from, or load only the common entries with strict=False"
        )


def _text(spec: TensorSpec | None) -> str:
    return "no tensor" if spec is None else f"a tensor of shape {list(spec.shape)}"
