"""`fsdp.copy_` after `ensure_ops`: definition, dispatch, traced graphs, and the semantics of `Tensor.copy_`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx

from compile_fsdp.ops import copy_, ensure_ops
from compile_fsdp.torch_compat import dispatch
from helpers.graphs.capture import capture
from helpers.ranks.fresh import run_fresh

# A plugin registers its kernel after the import of the ops, and before a model is compiled.
PLUGIN = """
import torch, compile_fsdp.ops
library = torch.library.Library("fsdp", "FRAGMENT")
library.impl("copy_", lambda tensor, data: tensor.fill_(7) and None, "PrivateUse1")
compile_fsdp.ops.ensure_ops()
tensor = torch.zeros(1)
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
compile_fsdp.ops.copy_.redispatch(keys, tensor, torch.ones(1))
print(int(tensor.item()))
"""

DEVICE_KEYS = ("Meta", "CPU", "CUDA", "XPU", "HPU", "MTIA", "PrivateUse1")


@pytest.fixture(autouse=True, scope="module")
def ops() -> None:
    ensure_ops()


def test_schema() -> None:
    assert copy_ is torch.ops.fsdp.copy_.default
    assert str(copy_._schema) == "fsdp::copy_(Tensor(a!) tensor, Tensor data) -> ()"
    assert dispatch.has_kernel("fsdp::copy_", "Functionalize")


@pytest.mark.parametrize("key", DEVICE_KEYS)
def test_every_device_kernel_copies(key: str) -> None:
    # Call the kernel by its key, with CPU tensors, because the device is missing.
    gc.collect()  # Supplied kernels outlive the call that supplied them.
    tensor = torch.zeros(2, 2)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    copy_.redispatch(keys, tensor, torch.tensor([1, 2]))
    assert tensor.tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_kernel_of_a_device_plugin_is_kept() -> None:
    assert run_fresh(PLUGIN)[0] == 7


def test_copy_returns_nothing_and_counts_as_a_write() -> None:
    tensor = torch.zeros(2)
    version = tensor._version
    assert copy_(tensor, torch.ones(2)) is None
    assert tensor._version > version


def test_aot_autograd_keeps_the_write() -> None:
    def fill_and_read(tensor: Tensor, data: Tensor) -> Tensor:
        with torch.no_grad():
            copy_(tensor, data * 2)
        return tensor + 1

    tensor = torch.zeros(3)
    result, graph = capture(fill_and_read, tensor, torch.ones(3), by_aot=True)
    assert (result.tolist(), tensor.tolist()) == ([3.0] * 3, [2.0] * 3)
    (copy,) = graph.find_nodes(op="call_function", target=copy_)
    (read,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert copy < read and read.args[0] is copy.args[0]
    assert cast(fx.Node, copy.args[0]).op == "placeholder"
    assert [n for n in graph.nodes if n.op == "call_function" and n.target._schema.is_mutable] == [copy]


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)

Layout = Callable[[Tensor], Tensor]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.transpose(0, -1) if base.dim() > 1 else base,
    "every other": lambda base: base[..., ::2] if base.dim() else base,
    "without the first": lambda base: base[1:] if base.dim() else base,
    "overlapping": lambda base: base.expand(2, *base.shape),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a copy: the bytes of the destination's storage, none on meta, and the type of the error."""

    error: type[BaseException] | None
    storage: bytes


def outcome(write: Callable[[Tensor, Tensor], object], base: Tensor, view: Layout, data: Tensor) -> Outcome:
    base = base.clone()
    target, error = view(base), None
    layout = target.shape, target.dtype
    try:
        write(target, data)
    except Exception as raised:
        error = type(raised)
    assert (target.shape, target.dtype) == layout
    # Bytes, because NaN differs from itself; of the whole storage, because a view must not write the rest.
    return Outcome(error, b"" if base.is_meta else bytes(base.untyped_storage()))


def values(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
    # Small and not negative, because the result of a conversion out of range is undefined.
    numel = torch.Size(shape).numel()
    return (torch.arange(start, start + numel) * 0.75).reshape(shape).to(dtype)


@st.composite
def broadcast_source(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: leading dimensions dropped, some set to 1."""
    dropped = draw(st.integers(0, len(shape)))
    return tuple(draw(st.sampled_from((size, 1))) for size in shape[dropped:])


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@settings(deadline=None, max_examples=250)
@given(st.data(), shapes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from([*LAYOUTS]))
def test_copy_equals_tensor_copy(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, source_dtype: torch.dtype, layout: str
) -> None:
    view = LAYOUTS[layout]
    base = values(shape, dtype, start=1)
    # Half of the sources fit; the rest are arbitrary and mostly refused.
    source_shape = data.draw(st.one_of(broadcast_source(tuple(view(base).shape)), shapes))
    source = values(source_shape, source_dtype, start=40)
    if data.draw(st.booleans()):
        source = LAYOUTS["transposed"](source)
    if data.draw(st.integers(0, 4)) == 0:
        base, source = base.to("meta"), source.to("meta")
    assert outcome(copy_, base, view, source) == outcome(Tensor.copy_, base, view, source)


def test_copy_onto_itself_changes_nothing() -> None:
    tensor = torch.arange(4.0)
    copy_(tensor, tensor)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_leaf_that_requires_grad_is_refused() -> None:
    for write in (copy_, Tensor.copy_):
        with pytest.raises(RuntimeError):
            write(torch.zeros(2, requires_grad=True), torch.ones(2))
    parameter = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        copy_(parameter, torch.ones(2))
    assert parameter.tolist() == [1.0, 1.0]
