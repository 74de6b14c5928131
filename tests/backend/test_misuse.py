"""Invalid use raises a specific error before any collective and leaves the model usable."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import compile_fsdp
from compile_fsdp import errors
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.reference import Stack
from helpers.models.tensor_subclasses import Float8Weight, LowPrecision, use
from helpers.parity.check import build, loss_of
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world
from helpers.ranks.fresh import run_fresh
from helpers.ranks.tests import on_ranks


def _shard(model: Any, **arguments: Any) -> Any:
    return shard_blocks(model, mesh=init_device_mesh("cpu", (2,)), **arguments)


_before = [0]  # number of the default group's collectives before the misuse


def _number() -> int:
    return dist.group.WORLD._get_sequence_number_for_group() if dist.group.WORLD is not None else 0


def _start_counting() -> None:
    _before[0] = _number()


def _compile(model: Any, **options: Any) -> Any:
    _start_counting()
    return compile_whole(model, **AOT_EAGER, **options)


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4, 8)}


def _never_sharded() -> None:
    torch.compile(nn.Linear(8, 8), backend="compile_fsdp", options=AOT_EAGER)(torch.ones(4, 8))


def _make_traceable_never_sharded() -> None:
    compile_fsdp.make_traceable(nn.Linear(8, 8))


def _fsdp1() -> None:
    compile_fsdp.make_traceable(nn.Sequential(FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))))


@contextmanager
def _without_process_group() -> Iterator[None]:
    dist.destroy_process_group()
    try:
        yield
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _start_counting()


def _process_group_destroyed() -> None:
    model = _compile(_shard(Stack()))
    with _without_process_group():
        model(**_batch())


def _process_group_missing() -> None:
    with mock.patch.dict(os.environ), _without_process_group():
        del os.environ["RANK"]
        compile_fsdp.fully_shard(nn.Linear(8, 8))


def _on_meta(**arguments: Any) -> None:
    with torch.device("meta"):
        model = Stack()
    _compile(_shard(model, **arguments))(**_batch())


def _offloaded_on_meta() -> None:
    _on_meta(offload_policy=CPUOffloadPolicy())


def _mixed_dtypes() -> None:
    model = Stack()
    model.layers[0].norm.bias.data = model.layers[0].norm.bias.data.bfloat16()
    _compile(_shard(model))(**_batch())


def _part_called_first() -> None:
    model = _compile(_shard(Stack()))
    model.layers[0](torch.ones(4, 8))
    _start_counting()
    model(**_batch())


def _replaced_parameter() -> None:
    model = _compile(_shard(Stack()))
    model.inp.weight = nn.Parameter(torch.ones(8, 8))
    model(**_batch())


class _Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _ReturnsOpaque(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return _Opaque(super().forward(x))


def _unknown_output_type() -> None:
    _compile(_shard(_ReturnsOpaque(8, 8)))(torch.ones(4, 8))


def _unknown_option() -> None:
    _compile(_shard(Stack()), innerbackend="aot_eager")(**_batch())


def _pending_unshard() -> None:
    # A second sharded model, because Dynamo of torch 2.11 refuses an RNN that it finds in torch's table of states.
    recurrent = compile_fsdp.fully_shard(nn.LSTM(4, 4))
    model = _shard(Stack())
    compiled = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    with torch.compiler.set_stance("force_eager"):
        compiled(**_batch()).backward()
    handle = model.layers[0].unshard(async_op=True)
    _start_counting()
    try:
        compiled(**_batch())
    finally:
        handle.wait()
        model.layers[0].reshard()
        del recurrent


def _symmetric_memory() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import SymmMemAllGather

    model = _shard(Stack())
    # Skip __init__, because it requires NCCL.
    model.layers[0].set_custom_all_gather(SymmMemAllGather.__new__(SymmMemAllGather))
    _compile(model)(**_batch())


class _StaysSubclass(Float8Weight):
    """A parameter whose unsharded value nests two tensor subclasses."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        value, inner = super().fsdp_post_all_gather(gathered, metadata, dtype)
        return LowPrecision(LowPrecision(value)), inner


def _unsharded_subclass() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    use([model], _StaysSubclass)
    _compile(_shard(model))(torch.ones(4, 8))


class _WritesWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight, dim=1))
        return super().forward(x)


def _writes_parameter() -> None:
    _compile(_shard(nn.Sequential(_WritesWeight(8, 8), nn.Linear(8, 8))))(torch.ones(4, 8))


CASES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (_never_sharded, errors.NotShardedError, "2 parameters weight, bias of a model that was never made traceable"),
    (_make_traceable_never_sharded, errors.NotShardedError, "found no FSDP2 module in Linear"),
    (_fsdp1, errors.FSDP1Error, "FullyShardedDataParallel at ['0']"),
    (_process_group_destroyed, errors.ProcessGroupMissingError, "init_process_group()"),
    (_process_group_missing, errors.ProcessGroupMissingError, "shard Linear over"),
    (_on_meta, errors.ParameterDeviceError, "layers.0.norm.weight"),
    (_offloaded_on_meta, errors.ParameterDeviceError, "layers.0.norm.weight"),
    (_mixed_dtypes, errors.ParameterDtypeError, "torch.float32 and {'layers.0.norm.bias': 'torch.bfloat16'}"),
    (_part_called_first, errors.RootError, "earlier forwards of layers.0 (Block)"),
    (_replaced_parameter, errors.ReplacedParameterError, "['inp.weight']"),
    (_unknown_output_type, errors.OutputTypeError, "_ReturnsOpaque"),
    (_unknown_option, errors.UnknownOptionError, "innerbackend"),
    (_pending_unshard, errors.UnsupportedFeatureError, "layers.0 (Block)"),
    (_writes_parameter, errors.UnsupportedFeatureError, "writes 0.weight in place"),
    (_unsharded_subclass, errors.UnsupportedFeatureError, "0.weight cannot be compiled with an all-gather extension"),
]
if torch.__version__ >= "2.12":
    refusal = "layers.0 cannot be compiled with symmetric memory"
    CASES.append((_symmetric_memory, errors.UnsupportedFeatureError, refusal))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[program.__name__ for program, _, _ in CASES])
@on_ranks(2)
def test_misuse_raises_before_collectives(rank: int, case: int) -> None:
    program, expected, message = CASES[case]
    _start_counting()
    with pytest.raises(expected, match=re.escape(message)) as error:
        program()
    assert error.type is expected
    assert _number() == _before[0]


_TORCHS_OWN_HOOKS = """
import json
import torch
from torch.distributed.fsdp import fully_shard
from compile_fsdp.tools.launch import fake_world
from helpers.models.reference import Stack

with fake_world(2):
    model = Stack()
    fully_shard(model.layers[0])
    model.compile(backend="compile_fsdp", fullgraph=True)
    try:
        model(x=torch.ones(4, 8))
    except torch._dynamo.exc.Unsupported as error:
        print(json.dumps(str(error)))
"""


def test_error_of_fullgraph_in_torchs_own_hooks_names_make_traceable() -> None:
    message, _ = run_fresh(_TORCHS_OWN_HOOKS)
    assert "call compile_fsdp.make_traceable() on it first" in message.splitlines()[0]
    assert "_fully_shard" in message  # Dynamo's own message follows


class _Unshards(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: Any = self[1]
        last.unshard()
        return super().forward(x)


def test_error_of_fullgraph_in_an_unshard_of_the_forward_does_not_name_make_traceable() -> None:
    with fake_world(2):
        model = compile_whole(shard_blocks(_Unshards(nn.Linear(4, 4), nn.Linear(4, 4))), **AOT_EAGER)
        with pytest.raises(torch._dynamo.exc.Unsupported) as error:
            model(torch.ones(2, 4))
        assert "unshard" in str(error.value)
        assert "make_traceable" not in str(error.value)


@on_ranks(2)
def test_optimizer_built_before_sharding_warns_once(rank: int) -> None:
    def warned(
        *rows_of_batches: int, is_early: bool = True, is_updated: bool = False, with_gradients: bool = True
    ) -> list[str]:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters()) if is_early else None
        _shard(model)
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters())
        elif is_updated:  # as by a trainer that prepares model and optimizer together
            optimizer.param_groups[0]["params"] = list(model.parameters())
        _compile(model)
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(with_gradients):
            warnings.simplefilter("always")
            for rows in rows_of_batches:
                model(torch.ones(rows, 8))
        return [str(each.message) for each in caught if each.category is errors.StaleOptimizerWarning]

    # The second number of rows traces the model again.
    (once,) = warned(4, 3)
    assert once.startswith("AdamW holds ['weight', 'bias'] (2 in all) as they were before fully_shard() replaced")
    for others in (warned(4, with_gradients=False), warned(4, is_updated=True), warned(4, is_early=False)):
        assert others == []


@on_ranks(2)
def test_unsupported_backwards_raise_and_model_still_trains(rank: int) -> None:
    model = _compile(_shard(Stack()))

    def twice(loss: torch.Tensor) -> None:
        output = loss * 1.0
        output.backward()
        (loss * 2.0).backward()

    parameters = list(model.parameters())
    programs: list[tuple[Callable[[torch.Tensor], Any], type[Exception]]] = [
        (twice, errors.SecondBackwardError),
        (lambda loss: loss.backward(create_graph=True), errors.DoubleBackwardError),
        (lambda loss: torch.autograd.grad(loss, parameters), errors.PartialBackwardError),
        (lambda loss: torch.autograd.grad(loss, parameters[3]), errors.PartialBackwardError),
        (lambda loss: loss.backward(inputs=parameters[:1]), errors.PartialBackwardError),
    ]
    for program, expected in programs:
        loss = model(**_batch())
        with pytest.raises(expected):
            program(loss)
        model.zero_grad()
        model.reset_iter_state()
    model(**_batch()).backward()
    assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
@on_ranks(2)
def test_graph_break_error_names_the_module(rank: int, way: str) -> None:
    case = build("graph_break", compile_fsdp.fully_shard)
    if way == "torch.compile":
        compiled = torch.compile(case.model, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    else:
        compiled = _compile(case.model)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        loss_of(compiled, case.batch())
    reference = build("graph_break", torch_fully_shard)
    with torch.compiler.set_stance("force_eager"):
        loss = loss_of(case.model, _batch())
    assert str(error.value).splitlines()[0] == "while compiling layers.0 (Block):"
    assert torch.equal(loss, loss_of(reference.model, _batch()))  # the model is usable


class _BreaksInRoot(nn.Module):
    """Reads a weight of modules that share a group, and breaks the graph, without calling the second module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) @ self.head.weight
        return y if y.sum() > 0 else -y


def test_graph_break_behind_shared_group_names_the_module_around_it() -> None:
    with fake_world(2):
        model = _BreaksInRoot()
        for modules in ([model.norm, model.head], model):
            compile_fsdp.fully_shard(modules)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"^while compiling the root \(_BreaksInRoot\):"):
            torch.compile(model, backend="compile_fsdp", fullgraph=True)(torch.ones(4, 4))


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


@on_ranks(2)
def test_fully_shard_raises_the_errors_of_torch(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for expected, make, arguments in (
        (ValueError, _Scalar, {}),
        (
            NotImplementedError,
            lambda: nn.Linear(7, 4),
            {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
        ),
        (ValueError, lambda: nn.Linear(8, 4), {"reshard_after_forward": 3}),
    ):
        texts = []
        for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
            with pytest.raises(expected) as error:
                fully_shard(make(), mesh=mesh, **arguments)
            assert error.type is expected
            texts.append(str(error.value))
        assert texts[0] == texts[1]
