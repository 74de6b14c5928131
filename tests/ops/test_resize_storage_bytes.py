"""`inductor.resize_storage_bytes_` has the schema and effects that the runtime needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops import copy_, ensure_ops, resize_storage_bytes, resize_storage_bytes_
from compile_fsdp.ops.definition import ensure_definition
from compile_fsdp.torch_compat import dispatch


@pytest.fixture(autouse=True)
def ops() -> None:
    ensure_ops()


def test_schema_and_kernels() -> None:
    assert resize_storage_bytes_ is torch.ops.inductor.resize_storage_bytes_.default
    assert dispatch.op_schema(resize_storage_bytes_) == (
        "inductor::resize_storage_bytes_(Tensor variable, SymInt new_size) -> ()"
    )
    assert ensure_definition(resize_storage_bytes.DEFINITION) == ()


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


def test_resize_frees_and_allocates() -> None:
    tensor = torch.ones(4)
    resize_storage_bytes_(tensor, 0)
    assert tensor.untyped_storage().nbytes() == 0 and tensor.shape == (4,)
    resize_storage_bytes_(tensor, 16)
    assert tensor.untyped_storage().nbytes() == 16
    assert tensor.fill_(3).tolist() == [3.0] * 4


def test_resize_frees_fake_tensors() -> None:
    with FakeTensorMode():
        tensor = torch.ones(4)
        resize_storage_bytes_(tensor, 0)
        assert tensor.untyped_storage().nbytes() == 0 and tensor.shape == (4,)


def test_a_traced_window_keeps_its_three_ops_in_order() -> None:
    graphs: list[fx.Graph] = []

    def keep(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph_module.graph)
        return graph_module.forward

    def window(unsharded: Tensor, gathered: Tensor) -> Tensor:
        unsharded.untyped_storage().resize_(16)
        copy_(unsharded, gathered)
        read = unsharded * 2
        unsharded.untyped_storage().resize_(0)
        return read

    unsharded = torch.empty(4)
    unsharded.untyped_storage().resize_(0)
    compiled = torch.compile(window, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert compiled(unsharded, torch.ones(4)).tolist() == [2.0] * 4
    assert unsharded.untyped_storage().nbytes() == 0
    (graph,) = graphs
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        resize_storage_bytes_,
        copy_,
        torch.ops.aten.mul.Tensor,
        resize_storage_bytes_,
    ]
