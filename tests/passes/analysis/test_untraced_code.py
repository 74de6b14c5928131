"""All user code that shapes a graph and that Dynamo does not trace is found, and has names in torch's caches."""

from __future__ import annotations

import operator
import os
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch.nn import functional as F
from torch.nn.functional import relu
from torch.utils.checkpoint import noop_context_fn

from compile_fsdp.passes.analysis.untraced_code import find_untraced_code, name_contexts
from compile_fsdp.torch_compat.dispatch import CHECKPOINT_CONTEXTS

_LIBRARY = "compile_fsdp_test_untraced"


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


def _scaled(factor: float, grad: torch.Tensor) -> torch.Tensor:
    return grad * factor if factor < 1.0 else _scaled(factor / 2.0, grad)


def _backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
    def scale(each: torch.Tensor) -> torch.Tensor:
        return _decorated(relu(each)) if torch.is_grad_enabled() else _module.in_module(F.gelu(each))

    return scale(grad) if operator.truth(context) else _halved(grad)


_halved = partial(_scaled, 0.5)
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
    return {code.co_name for code in find_untraced_code(gm).ops if code.co_filename == __file__}


@pytest.mark.parametrize("target", [_OVERLOAD, _OVERLOAD.overloadpacket])
def test_code_of_an_op_includes_all_that_its_functions_name(target: Callable[..., Any]) -> None:
    expected = {"_negate", "_backward", "_decorated", "once", "twice", "_in_module", "_scaled"}
    assert _names(_graph(target)) == expected


def test_ops_in_bodies_are_found() -> None:
    outer = _graph(torch.ops.aten.relu.default)
    assert find_untraced_code(outer).ops == ()
    outer.add_module("plain", torch.nn.ReLU())
    outer.add_module("body", _graph(_OVERLOAD))
    assert "_backward" in _names(outer)


def test_only_the_wrapper_of_a_decorator_is_code_of_torch() -> None:
    """The versions of torch and of Python identify their own code; a wrapper has the name of the user's function."""
    codes = find_untraced_code(_graph(_OVERLOAD)).ops
    (wrapper,) = (code for code in codes if code.co_filename != __file__)
    assert wrapper.co_filename.startswith(os.path.dirname(torch.__file__))


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
    assert {code.co_name for code in find_untraced_code(gm).ops} == {"kernel", "_in_module"}


def _contexts(every: int) -> Any:
    return every


class _Contexts:
    def __call__(self) -> None:
        pass


_OBJECT = _Contexts()


def _checkpoint(contexts: object) -> fx.GraphModule:
    """Return a graph beside the body of a selective checkpoint."""
    outer, body = _graph(torch.ops.aten.relu.default), _graph(torch.ops.aten.relu.default)
    body.meta[CHECKPOINT_CONTEXTS] = contexts
    outer.add_module("body", body)
    return outer


@pytest.mark.parametrize(
    ("contexts", "found"),
    [
        (_contexts, (_contexts,)),
        (partial(_contexts, 2), (_contexts,)),
        (_OBJECT, (_OBJECT,)),
        (noop_context_fn, ()),
        (None, ()),
    ],
)
def test_functions_that_make_the_contexts_of_checkpoints_are_found(contexts: object, found: tuple[object, ...]) -> None:
    assert find_untraced_code(_checkpoint(contexts)).contexts == found


def _named(contexts: object) -> Any:
    gm = _checkpoint(contexts)
    name_contexts(gm)
    return gm.get_submodule("body").meta.get(CHECKPOINT_CONTEXTS)


def test_contexts_have_hashes_of_their_texts() -> None:
    two, other, three = (_named(partial(_contexts, each)) for each in (2, 2, 3))
    assert two() == 2
    assert two.cache_hash == other.cache_hash != three.cache_hash
    assert "int 2" in pickle.loads(pickle.dumps(two))


def test_contexts_without_a_text_or_with_a_hash_of_the_user_are_left_alone() -> None:
    named = partial(_contexts, 2)
    named.cache_hash = "the user's"  # type: ignore[attr-defined]
    for each in (named, partial(_contexts, object()), None):
        assert _named(each) is each
