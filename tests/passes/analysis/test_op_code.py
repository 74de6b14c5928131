"""The code of a graph's custom ops includes all user code that their Python functions name."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch.nn import functional as F
from torch.nn.functional import relu

from compile_fsdp.passes.analysis.op_code import op_code

_LIBRARY = "compile_fsdp_test_op_code"


class _Scale:
    @staticmethod
    def once(grad: torch.Tensor) -> torch.Tensor:
        return grad * 2.0

    def twice(self, grad: torch.Tensor) -> torch.Tensor:
        return self.once(self.once(grad))


def _in_module(grad: torch.Tensor) -> torch.Tensor:
    return grad * _FACTOR


_FACTOR = 3.0
_module = types.ModuleType("a_module_of_the_user")
vars(_module)["in_module"] = _in_module


@torch.no_grad()
def _decorated(grad: torch.Tensor) -> torch.Tensor:
    return _Scale().twice(grad)


def _negate(x: torch.Tensor) -> torch.Tensor:
    return -x


def _backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
    def scale(each: torch.Tensor) -> torch.Tensor:
        return _decorated(relu(each)) if torch.is_grad_enabled() else _module.in_module(F.gelu(each))

    return scale(grad) if operator.truth(context) else _backward(True, grad)


_op = torch.library.custom_op(f"{_LIBRARY}::negate", _negate, mutates_args=(), schema="(Tensor x) -> Tensor")
_op.register_autograd(_backward)
_OVERLOAD = getattr(torch.ops, _LIBRARY).negate.default


def _graph(target: Callable[..., Any], **kwargs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x,), kwargs))
    return fx.GraphModule({}, graph)


def _names(gm: fx.GraphModule) -> set[str]:
    """Return the names of the user's functions in the code of the ops."""
    return {code.co_name for code in op_code(gm) if code.co_filename == __file__}


@pytest.mark.parametrize("target", [_OVERLOAD, _OVERLOAD.overloadpacket])
def test_code_of_an_op_includes_all_that_its_functions_name(target: Callable[..., Any]) -> None:
    expected = {"_negate", "_backward", "_decorated", "once", "twice", "_in_module"}
    assert _names(_graph(target)) == expected


def test_ops_in_bodies_are_found() -> None:
    outer = _graph(torch.ops.aten.relu.default)
    assert op_code(outer) == ()
    outer.add_module("plain", torch.nn.ReLU())
    outer.add_module("body", _graph(_OVERLOAD))
    assert "_backward" in _names(outer)


def test_only_the_wrapper_of_a_decorator_is_code_of_torch() -> None:
    """The versions of torch and of Python identify their own code; a wrapper has the name of the user's function."""
    assert {code.co_name for code in op_code(_graph(_OVERLOAD)) if code.co_filename != __file__} == {"decorate_context"}


def test_code_of_a_triton_kernel_includes_the_kernels_that_it_names() -> None:
    make: Any = type("JITFunction", (), {"__module__": "triton.runtime.jit"})
    inner, outer, tuned = make(), make(), make()
    inner.fn = _in_module
    # `make()` is a constant of Triton.
    variables = {"inner": inner, "constant": make(), "other": types.SimpleNamespace(fn=_decorated)}
    exec("def kernel(x):\n    return inner(x, constant, other)\n", variables)
    outer.fn, tuned.fn = variables["kernel"], outer
    index = triton_kernel_wrap.kernel_side_table.add_kernel(tuned)
    gm = _graph(triton_kernel_wrap.triton_kernel_wrapper_mutation, kernel_idx=index)
    assert {code.co_name for code in op_code(gm)} == {"kernel", "_in_module"}
