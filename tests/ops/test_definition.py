"""Checked ops, in test namespaces: with missing kernels, or a different schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.library import Library

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops.definition import DEVICE_KEYS, OpDefinition, ensure_definition, get_op
from compile_fsdp.torch_compat import dispatch

SIGNATURE = "(Tensor(a!) tensor, Tensor data) -> ()"
_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    """An op namespace that nothing else uses, so that a test cannot break the real ops."""
    return f"compile_fsdp_test_{next(_numbers)}"


@pytest.fixture
def library(namespace: str) -> Iterator[Library]:
    """Owner of the ops and kernels that a test defines in its namespace."""
    library = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    yield library
    library._destroy()  # type: ignore[no-untyped-call]


def some_kernel(tensor: Tensor, data: Tensor) -> None:
    tensor.fill_(7)


def copy(tensor: Tensor, data: Tensor) -> None:
    tensor.copy_(data)


@pytest.fixture
def definition(namespace: str, library: Library) -> OpDefinition:
    """A copy that torch would define with a Functionalize kernel and without device kernels."""
    library.define(f"copy_{SIGNATURE}")  # type: ignore[no-untyped-call]
    library.impl("copy_", some_kernel, "Functionalize")  # type: ignore[no-untyped-call]
    return OpDefinition(f"{namespace}::copy_", SIGNATURE, copy)


def test_missing_kernels_are_supplied(definition: OpDefinition, library: Library) -> None:
    op = get_op(definition)
    ensure_definition(definition, library)
    assert all(dispatch.has_kernel(definition.name, key) for key in DEVICE_KEYS)
    tensor = torch.zeros(2, 3)
    op(tensor, torch.arange(3))
    assert tensor.tolist() == [[0.0, 1.0, 2.0]] * 2
    ensure_definition(definition)  # adds nothing, because that would need a library


def test_existing_kernel_is_kept(definition: OpDefinition, library: Library) -> None:
    library.impl("copy_", some_kernel, "CPU")  # type: ignore[no-untyped-call]
    ensure_definition(definition, library)
    assert all(dispatch.has_kernel(definition.name, key) for key in DEVICE_KEYS)
    tensor = torch.zeros(1)
    get_op(definition)(tensor, torch.ones(1))
    assert tensor.item() == 7


def test_one_kernel_for_every_device_is_enough(definition: OpDefinition, library: Library) -> None:
    library.impl("copy_", some_kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    ensure_definition(definition, library)
    assert not any(dispatch.has_kernel(definition.name, key) for key in DEVICE_KEYS)


def test_supplied_kernels_live_as_long_as_their_library(definition: OpDefinition, namespace: str) -> None:
    kernels_owner = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    ensure_definition(definition, kernels_owner)
    assert dispatch.has_kernel(definition.name, "CPU")
    kernels_owner._destroy()  # type: ignore[no-untyped-call]
    assert not dispatch.has_kernel(definition.name, "CPU")


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param("copy_(Tensor tensor, Tensor data) -> ()", id="declares no write"),
        pytest.param("copy_(Tensor(a!) tensor, Tensor(b!) data) -> ()", id="writes its source"),
        pytest.param("copy_(Tensor(a!) tensor, Tensor data) -> Tensor(a!)", id="returns its destination"),
        pytest.param("copy_(Tensor(a!) tensor, Tensor data, bool non_blocking=False) -> ()", id="more arguments"),
        pytest.param("copy_(Tensor data, Tensor(a!) tensor) -> ()", id="other order"),
    ],
)
def test_different_schema_is_refused(namespace: str, library: Library, schema: str) -> None:
    library.define(schema)  # type: ignore[no-untyped-call]
    definition = OpDefinition(f"{namespace}::copy_", SIGNATURE, copy)
    with pytest.raises(OpDefinitionError) as error:
        ensure_definition(definition, library)
    assert f"expected the op {namespace}::copy_(Tensor(a!) tensor, Tensor data) -> ()" in str(error.value)
    assert f"found {namespace}::{schema}" in str(error.value)
    assert "install torch" in str(error.value)
    # A refused op gets no kernel.
    assert not any(dispatch.has_kernel(definition.name, key) for key in DEVICE_KEYS)


@pytest.mark.parametrize("kernel", [None, copy])
def test_error_names_missing_kernels_that_only_torch_has(namespace: str, library: Library, kernel: Any) -> None:
    library.define(f"copy_{SIGNATURE}")  # type: ignore[no-untyped-call]
    definition = OpDefinition(f"{namespace}::copy_", SIGNATURE, kernel)
    missing = "Functionalize" if kernel else "Meta, CPU, CUDA, XPU, HPU, MTIA, PrivateUse1, Functionalize"
    with pytest.raises(OpDefinitionError, match=f"every device and Functionalize, found none for {missing};"):
        ensure_definition(definition, library)
    assert not dispatch.has_kernel(definition.name, "CPU")


def test_error_names_a_missing_op_that_only_torch_defines(namespace: str) -> None:
    definition = OpDefinition(f"{namespace}::absent", "() -> ()")
    with pytest.raises(OpDefinitionError, match=rf"expected the op {namespace}::absent\(\) -> \(\), found none"):
        get_op(definition)


def test_a_checked_op_is_not_dead_code(namespace: str, library: Library) -> None:
    # Not the copy, because fx keeps ops that declare a write. This op declares none, like the resize.
    library.define("note(Tensor data) -> ()")  # type: ignore[no-untyped-call]
    library.impl("note", lambda data: None, "Functionalize")  # type: ignore[no-untyped-call]
    definition = OpDefinition(f"{namespace}::note", "(Tensor data) -> ()", lambda data: None)
    graph = fx.Graph()
    node = graph.call_function(get_op(definition), (graph.placeholder("data"),))
    assert not node.is_impure()
    ensure_definition(definition, library)
    graph.eliminate_dead_code()
    assert node in graph.nodes
