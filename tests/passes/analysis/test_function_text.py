"""Functions with equal code that read equal values have equal texts."""

from __future__ import annotations

import functools
import reprlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from compile_fsdp.passes.analysis.function_text import function_text

_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}
_counts = defaultdict[str, int](int)


def _counted(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    _counts[str(op)] += 1
    return CheckpointPolicy.MUST_SAVE


def _policy(saved: Any = (), every: int = 1, names: tuple[str, ...] = ("forward",)) -> Callable[..., Any]:
    """Return a function that makes contexts, as trainers write it: a count starts anew for each checkpoint."""

    def contexts() -> Any:
        counts = defaultdict[str, int](int)

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            counts[names[0]] += 1
            is_saved = (op in saved or op in _SAVED) and counts[names[0]] % every
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


def test_functions_with_equal_code_and_values_have_equal_texts() -> None:
    saved = {torch.ops.aten.mm.default, torch.ops.aten.add.Tensor}
    one, other = _policy(saved), _policy({*saved})
    assert one is not other
    text = function_text(one)
    assert text is not None
    assert function_text(other) == text
    assert " at 0x" not in text


@pytest.mark.parametrize(
    "other",
    [
        _policy({torch.ops.aten.mm.default}),
        _policy(every=2),
        _policy(every=True),
        _policy(names=("backward",)),
        lambda: _policy()(),
        partial(_policy, 1),
        _policy,
        None,
    ],
    ids=["set", "number", "type of a number", "string", "code", "partial", "defaults", "none"],
)
def test_functions_that_differ_have_different_texts(other: Any) -> None:
    assert _differ([function_text(_policy()), function_text(other)])


def _with_default(first: int, /, scale: float = 2.0, *, last: str = "a") -> Any:
    return first, scale, last


def _differ(texts: list[str | None]) -> bool:
    return None not in texts and len({*texts}) == len(texts)


def test_defaults_belong_to_the_text() -> None:
    texts = [function_text(_with_default)]
    for defaults, keywords in (((3.0,), {"last": "a"}), ((2.0,), {"last": "b"})):
        other = functools.update_wrapper(type(_with_default)(_with_default.__code__, globals()), _with_default)
        other.__defaults__, other.__kwdefaults__ = defaults, dict(keywords)
        texts.append(function_text(other))
    assert _differ(texts)


def test_values_of_globals_belong_to_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_text(_policy())
    monkeypatch.setitem(globals(), "_SAVED", {torch.ops.aten.mm.default})
    assert function_text(_policy()) not in (before, None)


def test_partial_has_the_text_of_its_function_and_arguments() -> None:
    ops = [torch.ops.aten.mm.default]
    texts = [
        function_text(partial(create_selective_checkpoint_contexts, ops)),
        function_text(partial(create_selective_checkpoint_contexts, [*ops, *ops])),
        function_text(partial(create_selective_checkpoint_contexts, policy_fn_or_list=ops)),
        function_text(partial(torch.utils.checkpoint.checkpoint, ops)),
    ]
    assert _differ(texts)
    assert function_text(partial(create_selective_checkpoint_contexts, [*ops])) == texts[0]


def test_module_has_the_text_of_its_name() -> None:
    assert _differ([function_text(lambda: torch), function_text(lambda: functools)])


def test_local_function_of_a_library_has_the_text_of_its_code() -> None:
    one, other, again = (function_text(reprlib.recursive_repr(fill)) for fill in ("one", "other", "one"))
    assert _differ([one, other]) and again == one


def test_function_that_calls_itself_has_a_text() -> None:
    def count(number: int) -> int:
        return number and count(number - 1)

    assert function_text(count) is not None


def _undefined() -> Callable[..., Any]:
    def decide() -> Any:
        return later

    if function_text(None) is None:
        later = 1
    return decide


@pytest.mark.parametrize(
    "function",
    [_counted, partial(_counted, object()), _policy({}), _undefined()],
    ids=["count in a dict", "object", "dict", "variable without a value"],
)
def test_function_that_reads_an_object_has_no_text(function: Callable[..., Any]) -> None:
    assert function_text(function) is None
