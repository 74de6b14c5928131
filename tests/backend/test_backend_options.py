"""Parsing and validation of the backend's options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp import Options
from compile_fsdp.errors import UnknownOptionError
from helpers.releases.skip import skip_before


def test_default_options() -> None:
    assert Options.parse(None) == Options(
        inner_backend="inductor",
        disabled_passes=frozenset(),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        memory_budget=None,
        costs=None,
        progress=True,
        agreement_timeout_s=1800.0,
        verify=False,
        inductor={},
    )


@pytest.mark.parametrize("given", ["BACKWARD_POST", BackwardPrefetch.BACKWARD_POST])
def test_backward_prefetch_accepts_enum_name_or_none(given: Any) -> None:
    assert Options.parse({"backward_prefetch": given}).backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert Options.parse({"backward_prefetch": None}).backward_prefetch is None


def test_inductor_options_are_separated_from_package_options() -> None:
    options = Options.parse({"inner_backend": "aot_eager", "max_autotune": True, "epilogue-fusion": False})
    assert options.inner_backend == "aot_eager"
    assert options.inductor == {"max_autotune": True, "epilogue-fusion": False}


def test_options_override_mode() -> None:
    assert Options.parse({"max_autotune": False}, "max-autotune-no-cudagraphs").inductor["max_autotune"] is False
    assert Options.parse({}, "max-autotune-no-cudagraphs").inductor["max_autotune"] is True


@pytest.mark.parametrize(
    ("given", "mode", "captures"),
    [
        ({}, "reduce-overhead", True),
        ({}, "max-autotune", True),
        ({"triton.cudagraphs": True}, None, True),
        ({"triton.cudagraphs": False}, "reduce-overhead", False),
        ({}, "max-autotune-no-cudagraphs", False),
        ({}, None, False),
    ],
)
def test_cuda_graphs_are_captured_by_this_package(given: dict[str, Any], mode: str | None, captures: bool) -> None:
    options = Options.parse(given, mode)
    assert options.cuda_graphs is captures
    assert not options.inductor.get("triton.cudagraphs", False)
    assert not (captures and options.keeps_steps)


def test_inductor_config_may_ask_for_cuda_graphs() -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert Options.parse({}).cuda_graphs
        assert not Options.parse({"triton.cudagraphs": False}).cuda_graphs


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bundle": "file"}, "bundle"),
        ({"verify": True, "disabled_passes": {"remove_unread"}}, "disabled_passes, verify"),
        ({"inner_backend": "aot_eager"}, "inner_backend"),
    ],
)
def test_options_that_exclude_cuda_graphs_are_refused(given: dict[str, Any], named: str) -> None:
    if named == "bundle":
        skip_before("2.13")
    with pytest.raises(UnknownOptionError, match=f"expected no option {named} together with CUDA graphs"):
        Options.parse(given, "reduce-overhead")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"inner": "inductor"}, ["['inner']", "inner_backend", "disabled_passes"]),
        ({"memory_bugdet": 1}, ["['memory_bugdet']; did you mean memory_budget in place of memory_bugdet?"]),
        ({"max_autotun": True}, ["; did you mean max_autotune in place of max_autotun?"]),
        ({"inner_backend": "inductr"}, ["'inductr'", "'inductor'", "'aot_eager'"]),
        ({"inner_backend": "compile_fsdp"}, ["'compile_fsdp'"]),
        ({"inner_backend": "cudagraphs"}, ["'cudagraphs'"]),
        ({"disabled_passes": {"no_such_pass"}}, ["no_such_pass", "remove_unshard_copies"]),
        ({"disabled_passes": "remove_unshard_copies"}, ["expected disabled_passes to be a set"]),
        ({"memory_budget": -1}, ["expected memory_budget to be a number of bytes"]),
        ({"memory_budget": 1.5}, ["expected memory_budget to be a number of bytes"]),
        ({"memory_budget": "all"}, ['expected memory_budget to be "auto" or a size such as 24GiB', "'all'"]),
        ({"memory_budget": "-1GiB"}, ["expected memory_budget to be a number of bytes, a size such as"]),
        ({"memory_budget": "1e999GiB"}, ["a size such as 24GiB or 4096"]),
        ({"agreement_timeout_s": float("inf")}, ["to be a finite number of seconds above 0, got inf"]),
        ({"costs": 3}, ["expected costs to be the path of a file", "a compile_fsdp.Costs, got 3"]),
        ({"post_grad_custom_pre_pass": None}, ["post_grad_custom_pre_pass"]),
    ],
)
def test_invalid_option_is_named_with_expected_values(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnknownOptionError) as error:
        Options.parse(given)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("1.5 MiB", 3 * 2**19), ("4096", 4096)])
def test_memory_budget_takes_a_size_with_a_unit(text: str, size: int) -> None:
    assert Options.parse({"memory_budget": text}).memory_budget == size
