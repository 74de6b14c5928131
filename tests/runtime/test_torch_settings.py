"""Compiled steps match eager FSDP2 if torch's global settings change before or between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import compile_fsdp
from helpers.models.global_settings import deterministic
from helpers.parity.check import Parity, compare_grads, loss_of
from helpers.parity.twins import Twins
from helpers.ranks.tests import on_ranks


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def anomaly() -> torch.autograd.detect_anomaly:
    return torch.autograd.detect_anomaly(check_nan=True)


SETTINGS = {each.__name__: each for each in (deterministic, default_dtype, anomaly)}


# Inductor is slow to test and adds little, because settings change only tracing, which both inner backends share.
INNER_BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("inner_backend", INNER_BACKENDS)
@pytest.mark.parametrize("name", list(SETTINGS))
@on_ranks(2)
def test_steps_match_eager_under_a_global_setting(rank: int, name: str, inner_backend: str) -> None:
    setting: Callable[[], contextmanager[None]] = SETTINGS[name]
    # "embedded", because embedding gradients have a separate deterministic kernel and tokens are integers.
    case = "mlp" if name == "anomaly" else "embedded"
    with setting():
        twins = Twins(rank, case, options={"inner_backend": inner_backend})
        twins.train()
        twins.train()
    assert len(compile_fsdp.reports()) == 2
    twins.train()  # without the setting
    assert twins.result.worst < 1e-5
    assert twins.result.differing == [] or inner_backend == "inductor"


@on_ranks(2)
def test_inference_mode_before_and_between_steps_matches_eager(rank: int) -> None:
    twins = Twins(rank)
    # Only compile_fsdp's model runs inference first, because eager FSDP2 cannot train after it (2.13).
    with torch.inference_mode():
        twins.ours.model(**twins.batch())
    twins.train()
    with torch.inference_mode():
        batch = {name: value.clone() for name, value in twins.batch().items()}
        losses = [case.model(**batch) for case in (twins.eager, twins.ours)]
    assert torch.equal(*losses)
    twins.train()
    assert twins.result.differing == []


@pytest.mark.parametrize("inner_backend", INNER_BACKENDS)
@on_ranks(2)
def test_anomaly_mode_error_names_the_nan_gradient(rank: int, inner_backend: str) -> None:
    twins = Twins(rank, options={"inner_backend": inner_backend})
    batch = {name: value * float("nan") for name, value in twins.batch().items() if value.is_floating_point()}
    with anomaly():
        loss = twins.ours.model(**{**twins.batch(), **batch})
        with pytest.raises(RuntimeError, match="expected no nan in the gradient of "):
            loss.backward()


@on_ranks(2)
def test_backward_inside_autocast_casts_nothing(rank: int) -> None:
    """Compares backwards inside autocast with eager backwards outside of it, behind a forward outside of it."""
    twins, result = Twins(rank, "mlp"), Parity()
    torch.manual_seed(rank)
    for step in range(3):
        batch = twins.eager.batch()
        for model, is_inside in ((twins.ours.model, True), (twins.eager.model, False)):
            loss = loss_of(model, batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                loss.backward()
        compare_grads(result, f"step {step}", twins.ours.model, twins.eager.model)
    assert result.differing == []
