"""Which collectives carry a name, or are the runtime's, when the passes have run."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from compile_fsdp.ops import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.passes.collectives import GATHER, NAME, REDUCE
from compile_fsdp.passes.named_collectives import use_named_collectives, use_torch_collectives
from graphs import GraphBuilder


def collectives(device: str) -> fx.Graph:
    build = GraphBuilder()
    with build.fake_mode:
        shard = build.input_like("shard", torch.empty(4, device=device))
    build.call(GATHER, shard, 2, "dp")
    build.call(REDUCE, shard, "sum", 2, "dp")
    return build.output(shard)


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("device", "gather"), [("cpu", all_gather_into_tensor), ("meta", GATHER)])
def test_of_collectives_without_a_name_only_gathers_on_the_cpu_are_replaced(device: str, gather: object) -> None:
    graph = collectives(device)
    use_named_collectives(graph)
    assert targets(graph) == [gather, REDUCE]


def test_names_survive_the_passes() -> None:
    graph = collectives("meta")
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[NAME] = "layers.0"
    use_named_collectives(graph)
    assert targets(graph) == [all_gather_into_tensor, reduce_scatter_tensor]
    assert all(node.args[-1] == "layers.0" for node in graph.nodes if node.op == "call_function")
    use_torch_collectives(graph)
    assert targets(graph) == [GATHER, REDUCE]


def test_gather_of_unknown_device_is_left_alone() -> None:
    graph = collectives("cpu")
    for node in graph.find_nodes(op="call_function", target=GATHER):
        del node.meta["val"]
    use_named_collectives(graph)
    assert targets(graph) == [GATHER, REDUCE]
