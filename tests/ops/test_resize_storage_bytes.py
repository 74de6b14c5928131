"""`inductor.resize_storage_bytes_` has the schema and effects that the runtime needs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops import copy_, ensure_ops, resize_storage_bytes, resize_storage_bytes_
from compile_fsdp.ops.definition import ensure_definition
from helpers.graphs.capture import capture
from helpers.graphs.execution import freed


@pytest.fixture(autouse=True)
def ops() -> None:
    ensure_ops()


def test_schema_and_kernels() -> None:
    assert resize_storage_bytes_ is torch.ops.inductor.resize_storage_bytes_.default
    schema = "inductor::resize_storage_bytes_(Tensor variable, SymInt new_size) -> ()"
    assert str(resize_storage_bytes_._schema) == schema
    ensure_definition(resize_storage_bytes.DEFINITION)  # raises if a kernel is missing


def test_different_definition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Change the expected definition, because a test cannot change torch's op.
    needed = replace(resize_storage_bytes.DEFINITION, signature="(Tensor(a!) variable, SymInt new_size) -> ()")
    monkeypatch.setattr(resize_storage_bytes, "DEFINITION", needed)
    with pytest.raises(OpDefinitionError, match=r"found inductor::resize_storage_bytes_\(Tensor variable, "):
        ensure_ops()


def test_resize_is_not_dead_code() -> None:
    graph = fx.Graph()
    node = graph.call_function(resize_storage_bytes_, (graph.placeholder("unsharded"), 0))
    graph.eliminate_dead_code()
    assert node in graph.nodes


@pytest.mark.parametrize("mode", [FakeTensorMode, nullcontext])
def test_resize_frees_and_allocates(mode: Any) -> None:
    with mode():
        tensor = torch.ones(4)
        resize_storage_bytes_(tensor, 0)
        assert tensor.untyped_storage().nbytes() == 0 and tensor.shape == (4,)
        resize_storage_bytes_(tensor, 16)
        assert tensor.untyped_storage().nbytes() == 16
    assert mode is FakeTensorMode or tensor.fill_(3).tolist() == [3.0] * 4


def test_a_traced_window_keeps_its_three_ops_in_order() -> None:
    def window(unsharded: Tensor, gathered: Tensor) -> Tensor:
        unsharded.untyped_storage().resize_(16)
        copy_(unsharded, gathered)
        read = unsharded * 2
        unsharded.untyped_storage().resize_(0)
        return read

    unsharded = freed(4)
    result, graph = capture(window, unsharded, torch.ones(4), by_aot=True)
    assert result.tolist() == [2.0] * 4
    assert unsharded.untyped_storage().nbytes() == 0
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert calls == [resize_storage_bytes_, copy_, torch.ops.aten.mul.Tensor, resize_storage_bytes_]
