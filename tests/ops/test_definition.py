"""Checked and supplied ops, in test namespaces: all missing, some missing, or different."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops.definition import (
    OpDefinition,
    ensure_definition,
    find_op,
    get_op,
    get_or_define_op,
)
from compile_fsdp.ops.fsdp_copy import define_copy
from compile_fsdp.torch_compat import dispatch

ALL_KEYS = ("Meta", "CPU", "CUDA", "XPU", "HPU", "MTIA", "PrivateUse1", "Functionalize")


def some_kernel(tensor: Tensor, data: Tensor) -> None:
    tensor.fill_(7)


def test_missing_kernels_are_supplied(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    op = get_or_define_op(definition, library)
    assert ensure_definition(definition, library) == ALL_KEYS
    assert dispatch.op_schema(op) == f"{namespace}::copy_(Tensor(a!) tensor, Tensor data) -> ()"
    assert all(dispatch.has_kernel(definition.name, key) for key in ALL_KEYS)
    tensor = torch.zeros(2, 3)
    op(tensor, torch.arange(3))
    assert tensor.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_second_call_supplies_nothing(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    op = get_or_define_op(definition, library)
    ensure_definition(definition, library)
    assert ensure_definition(definition, library) == ()
    assert get_or_define_op(definition, library) is op


def test_existing_kernel_is_kept(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    op = get_or_define_op(definition, library)
    library.impl("copy_", some_kernel, "CPU")  # type: ignore[no-untyped-call]
    supplied = ensure_definition(definition, library)
    assert supplied == tuple(key for key in ALL_KEYS if key != "CPU")
    tensor = torch.zeros(1)
    op(tensor, torch.ones(1))
    assert tensor.item() == 7


def test_one_kernel_for_every_device_is_enough(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    get_or_define_op(definition, library)
    library.impl("copy_", some_kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    assert ensure_definition(definition, library) == ("Functionalize",)


def test_supplied_kernels_live_as_long_as_their_library(namespace: str) -> None:
    owner = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    kernels_owner = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    definition = define_copy(f"{namespace}::copy_")
    get_or_define_op(definition, owner)
    ensure_definition(definition, kernels_owner)
    assert dispatch.has_kernel(definition.name, "CPU")
    kernels_owner._destroy()  # type: ignore[no-untyped-call]
    assert not dispatch.has_kernel(definition.name, "CPU")
    owner._destroy()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param("copy_(Tensor tensor, Tensor data) -> ()", id="declares no write"),
        pytest.param("copy_(Tensor(a!) tensor, Tensor(b!) data) -> ()", id="writes its source"),
        pytest.param("copy_(Tensor(a!) tensor, Tensor data) -> Tensor(a!)", id="returns its destination"),
        pytest.param(
            "copy_(Tensor(a!) tensor, Tensor data, bool non_blocking=False) -> ()", id="more arguments"
        ),
        pytest.param("copy_(Tensor data, Tensor(a!) tensor) -> ()", id="other order"),
    ],
)
def test_different_schema_is_refused(namespace: str, library: Library, schema: str) -> None:
    library.define(schema)  # type: ignore[no-untyped-call]
    definition = define_copy(f"{namespace}::copy_")
    with pytest.raises(OpDefinitionError) as error:
        ensure_definition(definition, library)
    assert f"expected the op {namespace}::copy_(Tensor(a!) tensor, Tensor data) -> ()" in str(error.value)
    assert f"found {namespace}::{schema}" in str(error.value)
    assert "install torch" in str(error.value)
    # A refused op gets no kernel.
    assert not any(dispatch.has_kernel(definition.name, key) for key in ALL_KEYS)


def test_error_names_a_missing_kernel_that_only_torch_has(namespace: str, library: Library) -> None:
    definition = replace(
        define_copy(f"{namespace}::copy_"), kernels={"CPU": some_kernel, "Functionalize": None}
    )
    get_or_define_op(definition, library)
    with pytest.raises(
        OpDefinitionError, match=r"kernels for CPU, Functionalize, found none for Functionalize;"
    ):
        ensure_definition(definition, library)
    assert not dispatch.has_kernel(definition.name, "CPU")


def test_error_names_a_missing_op_that_only_torch_defines(namespace: str) -> None:
    definition = OpDefinition(name=f"{namespace}::absent", signature="() -> ()", kernels={})
    assert find_op(definition.name) is None
    with pytest.raises(
        OpDefinitionError, match=rf"expected the op {namespace}::absent\(\) -> \(\), found none"
    ):
        get_op(definition)


def test_a_supplied_op_is_not_dead_code(namespace: str, library: Library) -> None:
    # Not the copy, because fx keeps ops that declare a write. This op declares none, like the resize.
    definition = OpDefinition(f"{namespace}::note", "(Tensor data) -> ()", {"CPU": lambda data: None})
    op = get_or_define_op(definition, library)
    graph = fx.Graph()
    node = graph.call_function(op, (graph.placeholder("data"),))
    assert not node.is_impure()
    ensure_definition(definition, library)
    graph.eliminate_dead_code()
    assert node in graph.nodes


def test_a_supplied_op_passes_through_functionalization(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    op = get_or_define_op(definition, library)
    ensure_definition(definition, library)

    def fill(tensor: Tensor, data: Tensor) -> Tensor:
        data.view(-1).mul_(2)  # A write through an alias, pending until the op reads `data`.
        op(tensor, data)
        return tensor + 1

    traced = make_fx(torch.func.functionalize(fill))(torch.zeros(2), torch.ones(2))
    (call,) = traced.graph.find_nodes(op="call_function", target=op)
    destination, source = call.args
    assert isinstance(destination, fx.Node) and destination.op == "placeholder"
    assert isinstance(source, fx.Node) and source.op != "placeholder"
    tensor = torch.zeros(2)
    assert traced(tensor, torch.ones(2)).tolist() == [3.0, 3.0]
    assert tensor.tolist() == [2.0, 2.0]


def test_supplied_op_takes_a_constant_in_functionalization(namespace: str, library: Library) -> None:
    definition = define_copy(f"{namespace}::copy_")
    op = get_or_define_op(definition, library)
    ensure_definition(definition, library)
    constant = torch.full((2,), 5.0)

    def fill(tensor: Tensor) -> Tensor:
        op(tensor, constant)
        return tensor.clone()

    assert torch.func.functionalize(fill)(torch.zeros(2)).tolist() == [5.0, 5.0]
