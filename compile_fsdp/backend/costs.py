"""The costs by which a graph is compiled.

[Note: Ranks share the rows]
Ranks may have batches of different sizes, but decide by equal costs. So the first graph of some groups takes the rows
of the rank with the largest batch. A rank that compiles alone later, for a different batch, reuses these rows and meets
nobody.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import fx

from compile_fsdp.backend.agreement import share_largest
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.options import Options
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.costs import usual_costs
from compile_fsdp.passes.analysis.eager_effects import is_upkeep
from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.tracing import GROUP_CALLS
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
from compile_fsdp.torch_compat.dynamo import graph_input_example

# By a graph's first group, then by the texts of all its groups: the rows that all ranks share.
_shared_rows: WeakKeyDictionary[TraceableGroup, dict[Hashable, int]] = WeakKeyDictionary()


def settle_costs(gm: fx.GraphModule, inputs: GraphInputs, options: Options) -> Costs | None:
    """Return the costs for a forward graph, as Dynamo has traced it, and its backward.

    If nothing is decided by costs, these are the user's costs, or None without them. Collective for the first graph of
    some groups: see [Note: Ranks share the rows].

    Raises:
        RankMissingError: a rank does not arrive within the limit.
    """
    groups = inputs.groups
    decides = options.inner_backend == "inductor" or options.memory_budget is not None
    if not (groups and decides):
        return options.costs
    usual = usual_costs(groups[0].fsdp_group.device)
    known = _shared_rows.setdefault(groups[0], {})
    key = inputs.texts  # excludes the options, so that all ranks meet, or none
    if key not in known:
        rows = _find_rows(gm, inputs) or usual.rows
        names, limit_s = inputs.process_groups(), options.agreement_timeout_s
        known[key] = int(share_largest(names, "forward graph", (rows, str(rows)), limit_s, options.progress))
    costs = options.costs or replace(usual, rows=0)
    return costs if costs.rows else replace(costs, rows=known[key])


def note_rows(first: TraceableGroup, texts: tuple[str, ...], rows: int) -> None:
    """Note the rows of a graph that no rank traces, for graphs of the same groups that a rank traces later.

    `first` is the graph's first group, and `texts` are those of all its groups.
    """
    _shared_rows.setdefault(first, {}).setdefault(texts, rows)


def _find_rows(gm: fx.GraphModule, inputs: GraphInputs) -> int:
    """Return the rows of this rank's batch; 0 if unknown.

    Returns the median over the parameter matrices, weighted by their elements and rounded up to a power of two. A
    matrix product has one row for each row of the batch, with as many elements as the parameter has rows.
    """
    counted: list[tuple[int, int]] = []
    for node, _ in inputs.managed_nodes():
        tensor = graph_input_example(node)
        if tensor.dim() >= 2 and tensor.numel():
            results = map(find_fake_tensor, _readers(gm, node))
            rows = [size_hint(each.numel()) // tensor.shape[0] for each in results if each is not None]
            if most := max(rows, default=0):
                counted.append((most, tensor.numel()))
    found = _weighted_median(counted)
    return 1 << (found - 1).bit_length() if found else 0


def _readers(gm: fx.GraphModule, tensor: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that compute with a tensor, checkpoint bodies included."""
    for user in tensor.users:
        if isinstance(user.target, HigherOrderOperator):
            body, *operands = user.args
            subgraph = Effects(gm).subgraph(body) if isinstance(body, fx.Node) else None
            if subgraph is not None:
                placeholders = subgraph.graph.find_nodes(op="placeholder")
                for operand, placeholder in zip(operands, placeholders, strict=False):
                    if operand is tensor:
                        yield from _readers(subgraph, placeholder)
        elif not (is_upkeep(user) or user.target in GROUP_CALLS or _is_view(user)):
            yield user


def _is_view(node: fx.Node) -> bool:
    result, sources = find_fake_tensor(node), [find_fake_tensor(each) for each in node.all_input_nodes]
    return result is not None and len(sources) == 1 and sources[0] is not None and result.numel() == sources[0].numel()


def _weighted_median(counted: Iterable[tuple[int, int]]) -> int:
    ordered = sorted(counted)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return 0
