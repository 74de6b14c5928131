"""Plans of random module trees equal torch's groups and keep tied parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import SharedParameterError
from compile_fsdp.wrap import CustomPolicy, apply, plan
from helpers.models.sharded import groups_of
from helpers.ranks.fake_world import fake_world

MOST = 8


class Node(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _grow(parents: list[int], ties: list[tuple[int, int]], paths: list[tuple[int, int]]) -> list[Node]:
    """Build a module tree, root first, with tied parameters and shared modules."""
    nodes = [Node(index + 1) for index in range(len(parents) + 1)]
    for index, parent in enumerate(parents, start=1):
        nodes[parent % index].add_module(f"child{index}", nodes[index])
    for first, second in ties:
        nodes[second % len(nodes)].weight = nodes[first % len(nodes)].weight
    for index, (parent, child) in enumerate(paths):
        parent, child = parent % len(nodes), child % len(nodes)
        if nodes[parent] not in set(nodes[child].modules()):  # no cycles
            nodes[parent].add_module(f"path{index}", nodes[child])
    return nodes


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(2):
        yield


INDEX = st.integers(0, MOST - 1)
PAIRS = st.lists(st.tuples(INDEX, INDEX), max_size=2)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(INDEX, min_size=1, max_size=MOST - 1), PAIRS, PAIRS, st.sets(INDEX, min_size=1))
def test_plan_equals_torch_groups_and_keeps_ties(parents: list[int], ties: Any, paths: Any, chosen: set[int]) -> None:
    nodes = _grow(parents, ties, paths)
    model = nodes[0]
    selected = {nodes[index] for index in chosen if 0 < index < len(nodes)}
    assume(selected)
    policy = CustomPolicy(lambda module: module in selected)
    fqns: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        fqns.setdefault(parameter, []).append(fqn)

    planned = plan(model, policy, fix_shared=True)
    found = [name for group in planned.groups for name in group.parameters]
    assert len(found) == len(set(found)) == len(fqns)
    assert sum(group.numel for group in planned.groups) == sum(parameter.numel() for parameter in fqns)
    merged = {module for group in planned.groups for module in group.modules}
    assert merged <= selected | {model}
    try:
        assert plan(model, policy).groups == planned.groups
    except SharedParameterError:
        assert merged < selected | {model} or any(len(group.modules) > 1 for group in planned.groups)

    apply(planned)
    torch_groups = {
        tuple(each["modules"]): [tuple(group["parameters"]) for group in each["groups"]] for each in groups_of(model)
    }
    assert torch_groups == {
        group.fqns: [group.parameters] if group.parameters else [] for group in planned.groups
    }
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(isinstance(parameter, DTensor) for parameter in after.values())
    assert all(after[fqn] is after[names[0]] for names in fqns.values() for fqn in names)
