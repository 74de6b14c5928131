"""`fsdp.copy_` after `ensure_ops`: definition, dispatch and traced graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from compile_fsdp.ops import copy_, ensure_ops
from compile_fsdp.torch_compat import dispatch
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


@pytest.fixture(autouse=True)
def ops() -> None:
    ensure_ops()


def test_schema() -> None:
    assert copy_ is torch.ops.fsdp.copy_.default
    assert dispatch.op_schema(copy_) == "fsdp::copy_(Tensor(a!) tensor, Tensor data) -> ()"
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

    graphs: list[fx.Graph] = []

    def keep(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph_module.graph)
        return graph_module.forward

    tensor = torch.zeros(3)
    compiled = torch.compile(fill_and_read, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert compiled(tensor, torch.ones(3)).tolist() == [3.0] * 3
    assert tensor.tolist() == [2.0] * 3
    (graph,) = graphs
    (copy,) = graph.find_nodes(op="call_function", target=copy_)
    (read,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert copy < read and read.args[0] is copy.args[0]
    assert cast(fx.Node, copy.args[0]).op == "placeholder"
    assert [n for n in graph.nodes if n.op == "call_function" and n.target._schema.is_mutable] == [copy]
