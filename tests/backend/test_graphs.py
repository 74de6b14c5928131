"""Graphs of a two-layer model before and after the passes, and their allowed inputs."""

from __future__ import annotations

from typing import Any

import expecttest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp.backend.compile import compile_fsdp as compile_graph
from compile_fsdp.torch_compat.dynamo import graph_input_example
from compile_fsdp.torch_compat.fsdp import param_groups
from helpers.graphs.capture import render_step
from helpers.models.blockwise import shard_blocks
from helpers.models.layers import Product
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks


def _two_layers() -> Any:
    model = nn.Sequential(Product(4, 4), Product(4, 4))
    return shard_blocks(model, mesh=init_device_mesh("cpu", (2,)))


def _render_step(rank: int) -> list[str]:
    model = _two_layers()
    return render_step(model, lambda: model(torch.ones(2, 4)).sum())


class TestTwoLayers(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls) -> None:
        cls.ranks = run_ranks(2, _render_step)

    def test_graphs_are_equal_on_all_ranks(self) -> None:
        assert self.ranks[0] == self.ranks[1]

    def test_forward_graph_before_passes(self) -> None:
        self.assertExpectedInline(self.ranks[0][0], """\
primals_1: f32[2, 4]
primals_2: f32[8]
primals_3: f32[4, 4]
primals_4: f32[8]
primals_5: f32[4, 4]
%0: f32[16] = all_gather_into_tensor(primals_2, 2, dp)
%1: f32[16] = wait_tensor(%0)
%2: f32[2, 8] = reshape(%1, [2, 8])
%3: f32[4, 4] = reshape(%2, [4, 4])
resize_storage_bytes_(primals_3, 64)
copy_(primals_3, %3)
%4: f32[2, 4] = mm(primals_1, primals_3)
%5: f32[2, 4] = tanh(%4)
resize_storage_bytes_(primals_3, 0)
%6: f32[16] = all_gather_into_tensor(primals_4, 2, dp)
%7: f32[16] = wait_tensor(%6)
%8: f32[2, 8] = reshape(%7, [2, 8])
%9: f32[4, 4] = reshape(%8, [4, 4])
resize_storage_bytes_(primals_5, 64)
copy_(primals_5, %9)
%10: f32[2, 4] = mm(%5, primals_5)
%11: f32[2, 4] = tanh(%10)
resize_storage_bytes_(primals_5, 0)
return (%11, primals_1, primals_5, %5, %11)
""")

    def test_forward_graph_after_passes(self) -> None:
        self.assertExpectedInline(self.ranks[0][1], """\
primals_1: f32[2, 4]
primals_2: f32[8]
primals_3: f32[4, 4]
primals_4: f32[8]
primals_5: f32[4, 4]
%0: f32[16] = all_gather_into_tensor(primals_2, 2, dp)
%1: f32[16] = all_gather_into_tensor(primals_4, 2, dp)
%2: f32[16] = wait_tensor(%0)
%3: f32[2, 8] = reshape(%2, [2, 8])
%4: f32[4, 4] = reshape(%3, [4, 4])
%5: f32[2, 4] = mm(primals_1, %4)
%6: f32[2, 4] = tanh(%5)
%7: f32[16] = wait_tensor(%1)
%8: f32[2, 8] = reshape(%7, [2, 8])
%9: f32[4, 4] = reshape(%8, [4, 4])
%10: f32[2, 4] = mm(%6, %9)
%11: f32[2, 4] = tanh(%10)
return (%11, primals_1, primals_5, %6, %11)
""")

    def test_backward_graph_after_passes(self) -> None:
        self.assertExpectedInline(self.ranks[0][3], """\
arg0_1: f32[2, 4]
arg1_1: f32[2, 4]
arg2_1: f32[4, 4]
arg3_1: f32[2, 4]
arg4_1: f32[2, 4]
arg5_1: f32[4, 4]
arg6_1: f32[8]
arg7_1: f32[8]
%0: f32[2, 4] = clone(arg0_1, memory_format=torch.contiguous_format)
%1: f32[16] = all_gather_into_tensor(arg6_1, 2, dp)
%2: f32[4, 2] = permute(arg3_1, [1, 0])
%3: f32[2, 4] = mul(arg4_1, arg4_1)
%4: f32[2, 4] = sub(1, %3)
%5: f32[2, 4] = mul(%0, %4)
%6: f32[4, 4] = mm(%2, %5)
%7: f32[2, 8] = reshape(%6, [2, -1])
%8: f32[16] = reshape(%7, [-1])
%9: f32[8] = reduce_scatter_tensor(%8, 'avg', 2, dp)
%10: f32[16] = wait_tensor(%1)
%11: f32[2, 8] = reshape(%10, [2, 8])
%12: f32[4, 4] = reshape(%11, [4, 4])
%13: f32[4, 4] = permute(%12, [1, 0])
%14: f32[2, 4] = mm(%5, %13)
%15: f32[4, 2] = permute(arg1_1, [1, 0])
%16: f32[2, 4] = mul(arg3_1, arg3_1)
%17: f32[2, 4] = sub(1, %16)
%18: f32[2, 4] = mul(%14, %17)
%19: f32[4, 4] = mm(%15, %18)
%20: f32[8] = wait_tensor(%9)
%21: f32[2, 8] = reshape(%19, [2, -1])
%22: f32[16] = reshape(%21, [-1])
%23: f32[8] = reduce_scatter_tensor(%22, 'avg', 2, dp)
%24: f32[8] = wait_tensor(%23)
return (%20, %24)
""")


@on_ranks(2)
def test_runtime_invariants_hold_over_three_steps(rank: int) -> None:
    model = _two_layers()
    captured: list[list[Any]] = []

    def capture(gm: fx.GraphModule, inputs: Any, options: Any = None) -> Any:
        examples = [graph_input_example(n) for n in gm.graph.find_nodes(op="placeholder")]
        captured.append([example for example in examples if isinstance(example, torch.Tensor)])
        return compile_graph(gm, inputs, options={"inner_backend": "aot_eager"})

    model.compile(backend=capture, fullgraph=True)
    x = torch.ones(2, 4)
    params = [p for layer in model for g in param_groups(layer._get_fsdp_state()) for p in g.fsdp_params]
    unsharded = []
    for _ in range(3):
        model(x).sum().backward()
        unsharded.append([p._unsharded_param for p in params])
        for p in params:
            assert p._unsharded_param.untyped_storage().size() == 0 and p._unsharded_param.grad is None, p._param_fqn
        assert all(p.to_local().shape[0] == 2 for p in model.parameters())
    assert all(each is first for now in unsharded for each, first in zip(now, unsharded[0], strict=True))
    allowed = {id(x)}
    allowed |= {id(p._sharded_param_data) for p in params} | {id(p._unsharded_param) for p in params}
    (inputs,) = captured
    assert {id(t) for t in inputs} == allowed, [tuple(t.shape) for t in inputs]
