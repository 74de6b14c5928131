"""Ranks with different graphs all raise, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import io
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import compile_fsdp
from compile_fsdp.errors import CollectiveMismatchError, RankMissingError
from harness import run_ranks
from twins import AOT_EAGER, Twins


def _model(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    model = nn.Sequential(*layers)
    for layer in layers:
        compile_fsdp.fully_shard(layer)
    compile_fsdp.fully_shard(model)
    return model


def _step(model: nn.Module, options: dict[str, object]) -> None:
    model.compile(backend="compile_fsdp", fullgraph=True, options={**AOT_EAGER, **options})
    model(torch.ones(2, 8)).sum().backward()


def _error_of(model: nn.Module, options: dict[str, object]) -> tuple[str, str]:
    try:
        _step(model, options)
    except (CollectiveMismatchError, RankMissingError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _other_width(rank: int) -> tuple[str, str]:
    return _error_of(_model([8, 8, 8 + 8 * rank]), {})


def test_the_first_difference_is_named_on_all_ranks() -> None:
    errors = run_ranks(2, _other_width)
    assert errors[0] == errors[1] and errors[0][0] == "CollectiveMismatchError"
    for part in ("forward graph", "on rank 0 all_gather_into_tensor of float32[36]", "on rank 1", "float32[72]", "(1)"):
        assert part in errors[0][1]


def _other_options(rank: int) -> tuple[tuple[str, str], list[torch.Tensor]]:
    model = _model([8, 8])
    error = _error_of(model, {"disabled_passes": {"pack_gathers"} if rank else set()})
    _step(model, {})  # usable afterwards
    return error, [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def test_settings_are_compared_and_the_model_stays_usable() -> None:
    for (kind, message), grads in run_ranks(2, _other_options):
        assert kind == "CollectiveMismatchError" and "passes by aot_eager" in message
        assert all(grad.abs().sum() > 0 for grad in grads)


def _missing(rank: int) -> tuple[str, str, float]:
    model = _model([8, 8])
    start = time.monotonic()
    error = ("", "") if rank else _error_of(model, {"agreement_timeout_s": 1.0})
    seconds = time.monotonic() - start
    dist.barrier()
    return (*error, seconds)


def test_a_rank_that_does_not_come_is_named() -> None:
    kind, message, _ = run_ranks(2, _missing)[0]
    assert kind == "RankMissingError" and "expected rank 1 to compile its forward graph within 1 s" in message


def _late(rank: int) -> str:
    model = _model([8, 8])
    if rank == 1:
        time.sleep(4.0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        _step(model, {})
    return said.getvalue()


def test_a_late_rank_is_waited_for_and_said_so() -> None:
    assert "waiting for the other ranks' forward graph" in run_ranks(2, _late)[0]


def _other_batch(rank: int) -> tuple[list[str], int]:
    twins = Twins(rank, dynamic=False)
    twins.train()
    if rank == 0:
        twins.eager.batch = lambda: {"x": torch.randn(6, 8)}  # type: ignore[method-assign]
    twins.train()
    return twins.result.differing, len(compile_fsdp.reports())


def test_a_rank_may_compile_anew_alone() -> None:
    results = run_ranks(2, _other_batch)
    assert [differing for differing, _ in results] == [[], []]
    assert [graphs for _, graphs in results] == [4, 2]
