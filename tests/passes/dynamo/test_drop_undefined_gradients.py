"""Ops that only undefined gradients need leave the graph; other results do not change."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.dynamo.drop_undefined_gradients import drop_undefined_gradients

_aten = torch.ops.aten


def call_aot_bwd_prologue(saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (*saved, *grads)


def call_accumulate_grad(variable: torch.Tensor, grad: torch.Tensor) -> None:
    variable.add_(grad)


def call_hook(hook: object, leaf: torch.Tensor, *, hook_type: str) -> None:
    leaf.mul_(2.0)


class _Captured:
    """A graph as compiled autograd captures it: three leaves, a weight, a defined and an undefined gradient."""

    def __init__(self) -> None:
        self.graph = graph = fx.Graph()
        inputs = graph.placeholder("inputs")
        *self.leaves, weight, grad = (graph.call_function(operator.getitem, (inputs, i)) for i in range(5))
        self.zeros = graph.call_function(_aten.zeros.default, ([2, 2],), {"dtype": torch.float32})
        prologue = graph.call_function(call_aot_bwd_prologue, ((weight,), (grad, self.zeros)))
        self.weight, self.defined, self.undefined = (
            graph.call_function(operator.getitem, (prologue, i)) for i in range(3)
        )
        self.defined.name, self.undefined.name = "aot0_tangents_1", "aot0_tangents_2"

    def op(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def accumulate(self, leaf: int, grad: fx.Node) -> None:
        self.graph.call_function(call_accumulate_grad, (self.leaves[leaf], grad))
        self.graph.call_function(call_hook, (None, self.leaves[leaf]), {"hook_type": "post_acc_grad_hook"})

    def dropped(self, has_gradient: Sequence[bool] = (True, True)) -> tuple[str, list[int]]:
        """The calls left by the pass, and the leaves without a gradient; other leaves get equal gradients."""
        self.graph.output(())
        gm = fx.GraphModule({}, self.graph)
        torch.manual_seed(0)
        before = [torch.rand(2, 2) for _ in range(5)]
        after = [each.clone() for each in before]
        old = [each.clone() for each in before]
        gm(before)
        without = drop_undefined_gradients(gm.graph, has_gradient, before)
        gm.graph.lint()
        gm.recompile()
        gm(after)
        for i in range(3):
            torch.testing.assert_close(after[i], old[i] if i in without else before[i], rtol=0, atol=0)
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        text = "\n".join(f"{node} = {getattr(node.target, '__name__', node.target)}{node.args}" for node in calls)
        return text, without


def test_sum_becomes_its_defined_gradient() -> None:
    captured = _Captured()
    ours = captured.op(_aten.mm.default, captured.defined, captured.weight)
    other = captured.op(_aten.mm.default, captured.undefined, captured.weight)
    captured.accumulate(0, captured.op(_aten.neg.default, other))
    total = captured.op(_aten.add.Tensor, ours, other)
    captured.accumulate(1, captured.op(_aten.neg.default, total))
    text, without = captured.dropped()
    assert without == [0]
    assert_expected_inline(text, """\
getitem_1 = getitem(inputs, 1)
getitem_3 = getitem(inputs, 3)
getitem_4 = getitem(inputs, 4)
zeros_default = zeros.default([2, 2],)
call_aot_bwd_prologue = call_aot_bwd_prologue((getitem_3,), (getitem_4, zeros_default))
getitem_5 = getitem(call_aot_bwd_prologue, 0)
aot0_tangents_1 = getitem(call_aot_bwd_prologue, 1)
mm_default = mm.default(aot0_tangents_1, getitem_5)
neg_default_1 = neg.default(mm_default,)
call_accumulate_grad_1 = call_accumulate_grad(getitem_1, neg_default_1)
call_hook_1 = call_hook(None, getitem_1)""")


def test_ops_other_than_plain_sums_read_zeros() -> None:
    captured = _Captured()
    other = captured.op(_aten.mm.default, captured.undefined, captured.weight)
    total = captured.op(_aten.sum.dim_IntList, captured.defined, [0])
    captured.accumulate(1, captured.op(_aten.add.Tensor, total, other))
    both = captured.op(_aten.cat.default, [captured.defined, other])
    captured.accumulate(0, captured.op(_aten.slice.Tensor, both, 0, 1, 3))
    captured.accumulate(2, captured.op(_aten.maximum.default, captured.undefined, captured.defined))
    text, without = captured.dropped()
    assert without == []
    assert_expected_inline("\n".join(text.splitlines()[10:]), """\
add_tensor = add.Tensor(sum_dim_int_list, zeros_default_1)
call_accumulate_grad = call_accumulate_grad(getitem_1, add_tensor)
call_hook = call_hook(None, getitem_1)
zeros_default_2 = zeros.default([2, 2],)
cat_default = cat.default([aot0_tangents_1, zeros_default_2],)
slice_tensor = slice.Tensor(cat_default, 0, 1, 3)
call_accumulate_grad_1 = call_accumulate_grad(getitem, slice_tensor)
call_hook_1 = call_hook(None, getitem)
zeros_default_3 = zeros.default([2, 2],)
maximum_default = maximum.default(zeros_default_3, aot0_tangents_1)
call_accumulate_grad_2 = call_accumulate_grad(getitem_2, maximum_default)
call_hook_2 = call_hook(None, getitem_2)""")


def test_value_of_zeros_that_is_not_zero_stays_if_others_read_it() -> None:
    captured = _Captured()
    captured.op(_aten.nonzero.default, captured.weight)  # its size depends on data
    scaled = captured.op(_aten.mul.Tensor, captured.undefined, captured.weight)
    is_zero = captured.op(_aten.eq.Scalar, scaled, 0)
    captured.accumulate(0, captured.op(_aten.mul.Tensor, captured.defined, is_zero))
    captured.accumulate(1, captured.op(_aten.exp.default, captured.undefined))
    text, without = captured.dropped()
    assert without == [1]
    assert "eq_scalar = eq.Scalar(zeros_default_1, 0)" in text
    assert "mul_tensor_1 = mul.Tensor(aot0_tangents_1, eq_scalar)" in text
    assert "exp" not in text


def test_a_graph_without_undefined_gradients_stays() -> None:
    captured = _Captured()
    captured.zeros.target = _aten.ones.default
    captured.accumulate(0, captured.op(_aten.neg.default, captured.undefined))
    before = len(captured.graph.nodes)
    _, without = captured.dropped()
    assert without == [] and len(captured.graph.nodes) == before + 1


def test_gradients_of_a_forward_with_more_or_fewer_results_are_matched_by_value() -> None:
    for has_gradient in ((True,), (True, False, True), (True, True, True)):
        captured = _Captured()
        captured.accumulate(0, captured.op(_aten.neg.default, captured.undefined))
        captured.accumulate(1, captured.op(_aten.neg.default, captured.defined))
        _, without = captured.dropped(has_gradient)
        assert without == [0]


def test_gradients_that_cannot_be_matched_stay_zeros() -> None:
    def call_aot_bwd_prologue(saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (*saved, *(grad.clone() for grad in grads))

    captured = _Captured()
    captured.undefined.args[0].target = call_aot_bwd_prologue  # type: ignore[union-attr]
    captured.accumulate(0, captured.op(_aten.neg.default, captured.undefined))
    before = len(captured.graph.nodes)
    _, without = captured.dropped(has_gradient=(True, False, True))
    assert without == [] and len(captured.graph.nodes) == before + 1


def test_outputs_without_gradient_are_left_out() -> None:
    captured = _Captured()
    prologue = captured.undefined.args[0]
    assert isinstance(prologue, fx.Node)
    saved, grads = prologue.args
    prologue.args = (saved, (None, *grads))  # type: ignore[misc]
    captured.undefined.args, captured.defined.args = (prologue, 3), (prologue, 2)
    captured.accumulate(0, captured.op(_aten.neg.default, captured.undefined))
    captured.accumulate(1, captured.op(_aten.neg.default, captured.defined))
    _, without = captured.dropped(has_gradient=(False, True, True))
    assert without == [0]
