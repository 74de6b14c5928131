"""State of optimizers that wrap other optimizers, or that keep tensors of their own classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from lightning_fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from compile_fsdp import fully_shard
from compile_fsdp.errors import StateMismatchError
from compile_fsdp.state import load, load_optim_state_dict, optim_state_dict, restore, save
from compile_fsdp.torch_compat.distributed import local_tensor
from helpers.models.optimizers import assert_same
from helpers.ranks.tests import on_ranks


class _Lookahead(Optimizer):
    """Steps the optimizer that it holds, and has state of its own."""

    def __init__(self, fast: Optimizer, hold: Callable[[Optimizer], Any]) -> None:
        self.step_fast = fast.step
        self.optimizer = hold(fast)
        super().__init__(fast.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.step_fast()


def _accelerated(optim: Optimizer) -> Any:
    Accelerator(cpu=True)  # which sets the state that the wrapper reads
    return AcceleratedOptimizer(optim, device_placement=False)


def _in_fabric(optim: Optimizer) -> Any:
    strategy = SimpleNamespace(get_optimizer_state=Optimizer.state_dict, optimizer_step=Optimizer.step)
    return _FabricOptimizer(optim, strategy)  # type: ignore[arg-type]


WRAPPERS = {"accelerate": _accelerated, "Fabric": _in_fabric}


@pytest.fixture
def _no_accelerator() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _trained(rate: float, steps: int) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.usefixtures("_no_accelerator")
def test_state_is_loaded_into_the_wrapped_optimizer(wrapper: str, tmp_path: Path) -> None:
    model, optim = _trained(0.1, 2)
    wrapped = WRAPPERS[wrapper](optim)
    saved = optim_state_dict(model, wrapped)
    save(model, wrapped, tmp_path, 2)
    loads: list[Callable[[nn.Module, Optimizer], object]] = [
        lambda model, optim: load_optim_state_dict(model, optim, saved),
        lambda model, optim: load(model, optim, tmp_path),
    ]
    for into in loads:
        other, other_optim = _trained(0.5, 0)
        into(other, WRAPPERS[wrapper](other_optim))
        assert_same(optim_state_dict(other, other_optim), saved)
        assert other_optim.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.usefixtures("_no_accelerator")
def test_refused_state_changes_no_wrapped_optimizer(
    wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optim = _trained(0.1, 2)
    saved = optim_state_dict(model, optim)
    save(model, optim, tmp_path, 2)
    broken = {**saved, "state": {**saved["state"], "weight": {"step": torch.tensor(2.0)}}}
    other, other_optim = _trained(0.5, 1)
    wrapped = WRAPPERS[wrapper](other_optim)
    state, groups = other_optim.state, other_optim.param_groups
    before = copy.deepcopy(optim_state_dict(other, other_optim))
    with pytest.raises(StateMismatchError, match="missing: weight: exp_avg"):
        load_optim_state_dict(other, wrapped, broken)
    monkeypatch.setattr(restore, "set_model_state_dict", Mock(side_effect=RuntimeError("not today")))
    with pytest.raises(RuntimeError, match="not today"):
        load(other, wrapped, tmp_path)
    assert other_optim.state is state and other_optim.param_groups is groups
    assert_same(optim_state_dict(other, other_optim), before)


HOLDS: dict[str, Callable[[Optimizer], Any]] = {
    "itself": lambda fast: fast,
    "in a list": lambda fast: [fast],
    "in a dict": lambda fast: {"fast": fast},
}


@pytest.mark.parametrize("held", HOLDS)
def test_load_steps_no_optimizer_that_another_one_holds(held: str) -> None:
    model, fast = _trained(0.1, 2)
    saved, fast_state = optim_state_dict(model, fast), fast.state
    optim = _Lookahead(fast, HOLDS[held])
    model(torch.ones(2, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    load_optim_state_dict(model, optim, saved)
    assert fast.state is fast_state and all(torch.equal(before[name], each) for name, each in model.named_parameters())
    assert_same(optim_state_dict(model, optim), saved)


def _quantized(mesh: DeviceMesh, rows: int = 64) -> tuple[Any, Optimizer]:
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(128, rows, bias=False), mesh=mesh)
    return model, AdamW8bit(model.parameters(), lr=0.1)


def _step(model: Any, optim: Optimizer, seed: int) -> Tensor:
    torch.manual_seed(seed)
    model(torch.randn(4, 128)).sin().sum().backward()
    optim.step()
    optim.zero_grad()
    return cast(Tensor, model.weight.full_tensor()).clone()


@on_ranks(2)
def test_quantized_state_keeps_its_class(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = _quantized(mesh)
    _step(model, optim, 1)
    save(model, optim, tmp_path, 1)
    sharded, full = optim_state_dict(model, optim), optim_state_dict(model, optim, full=True)
    assert type(full["state"]["weight"]["exp_avg"]) is Tensor
    loads = {
        "checkpoint": lambda model, optim: load(model, optim, tmp_path),
        "sharded": lambda model, optim: load_optim_state_dict(model, optim, sharded),
        "full": lambda model, optim: load_optim_state_dict(model, optim, full),
    }
    loaded = {}
    for name, into in loads.items():
        other, other_optim = loaded[name] = _quantized(mesh)
        with torch.no_grad():
            other.weight.copy_(model.weight)
        into(other, other_optim)
        (state,) = other_optim.state.values()
        assert type(state["exp_avg"].to_local()).__name__ == "OptimState8bit"
    weight = _step(model, optim, 2)
    for name, (other, other_optim) in loaded.items():
        difference = (_step(other, other_optim, 2) - weight).abs().max()
        assert difference <= (0.1 if name == "full" else 0.0)  # a full state is quantized again


def _codes(optim: Optimizer) -> list[Tensor | None]:
    """The quantized values of each parameter's state; None if they are not quantized."""
    return [getattr(local_tensor(state["exp_avg"]), "codes", None) for state in optim.state.values()]


def test_quantized_state_is_loaded_without_a_process_group() -> None:
    from torchao.optim import AdamW8bit

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optim, other, plain = (make(model.parameters()) for make in (AdamW8bit, AdamW8bit, AdamW))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optim.step()
        load_optim_state_dict(model, other, optim_state_dict(model, optim))
        load_optim_state_dict(model, plain, optim_state_dict(model, optim))
    for loaded, codes in zip(_codes(other), _codes(optim), strict=True):
        assert loaded is not None and codes is not None and loaded is not codes and torch.equal(loaded, codes)
    assert all(type(state["exp_avg"]) is Tensor for state in plain.state.values())


@pytest.mark.parametrize("rows", [64, 95])
@on_ranks(2)
def test_full_state_is_plain_whichever_ranks_quantize(rank: int, rows: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    is_plain = rank == 1 and rows == 95  # 47 rows are not a multiple of torchao's blocks
    with torch.compiler.set_stance("force_eager"):
        model, optim = _quantized(mesh, rows)
        _step(model, optim, 1)
        assert [codes is None for codes in _codes(optim)] == [is_plain]
        full = optim_state_dict(model, optim, full=True)
        first = optim_state_dict(model, optim, full=True, rank0_only=True)
        if rank == 0:
            assert_same(first, full)
        for state in (optim_state_dict(model, optim), full, first):
            other, other_optim = _quantized(mesh, rows)
            load_optim_state_dict(other, other_optim, state)
            assert [codes is None for codes in _codes(other_optim)] == [is_plain]
            _step(other, other_optim, 2)
