"""The costs by which a graph is compiled, on all ranks.

[Note: Costs are measured once]
The first graph of a process group without stored costs measures its collectives, in a second or two, and stores the
costs for later processes. The first rank decides whether to measure, because each host may have a separate cache. All
ranks meet before they measure, including ranks whose user gives costs. So a missing rank, or a rank that does not
measure, leaves no peer waiting in a collective. Ranks may have batches of different sizes: the rank with the largest
batch decides the costs for all of them. A rank that compiles alone later, for a different batch, reuses these costs and
meets nobody.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial, reduce
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from compile_fsdp.backend.agreement import real_groups, share_by, share_largest
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.calibration import store
from compile_fsdp.calibration.measure import Measurements, measure
from compile_fsdp.options import Options
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.costs import usual_costs
from compile_fsdp.passes.analysis.eager_effects import is_upkeep
from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.group_calls import GROUP_CALLS
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
from compile_fsdp.torch_compat.dynamo import graph_input_example

_MEASURE, _REFUSE = "measure", "refuse"

# By a graph's first group, then by the texts of all its groups: the costs that all ranks have agreed on.
_settled: WeakKeyDictionary[TraceableGroup, dict[Hashable, Costs]] = WeakKeyDictionary()

_measured: WeakKeyDictionary[dist.ProcessGroup, dict[torch.dtype, Measurements]] = WeakKeyDictionary()


def settle_costs(gm: fx.GraphModule, inputs: GraphInputs, options: Options) -> Costs | None:
    """Return the costs for a graph and its backward.

    May issue collectives: see [Note: Costs are measured once].

    Args:
        gm: The forward graph, as Dynamo has traced it.
        inputs: Inputs of the graph.
        options: The user's options.
    Returns:
        The costs. If nothing is decided by costs: the user's numbers, or None without them.
    Raises:
        RankMissingError: a rank does not arrive within the limit.
    """
    groups = inputs.groups
    decides = options.inner_backend == "inductor" or options.memory_budget is not None
    if not (groups and decides):
        return options.known_costs
    known = _settled.setdefault(groups[0], {})
    key = tuple(group.constants.text for group in groups)  # excludes the options, so that all ranks meet, or none
    usual = usual_costs(groups[0].fsdp_group.device)
    if key not in known:
        costs = _measured_costs(inputs, usual, options) if options.inner_backend == "inductor" else usual
        costs = replace(costs, rows=_find_rows(gm, inputs) or usual.rows)
        # Costs that the user gives on one rank apply to this rank. If they change its collectives, `agree` raises.
        own = costs.rows if options.known_costs is None else -1, json.dumps(asdict(costs))
        names, limit_s = inputs.process_groups(), options.agreement_timeout_s
        known[key] = Costs(**json.loads(share_largest(names, "forward graph", own, limit_s, options.progress)))
    if options.known_costs is not None:
        return options.known_costs
    return known[key] if options.measures_costs else replace(usual, rows=known[key].rows)


def _measured_costs(inputs: GraphInputs, usual: Costs, options: Options) -> Costs:
    """Return the costs of the slowest process group with sharded parameters."""
    device, dtype = inputs.groups[0].fsdp_group.device, _compute_dtype(inputs)
    names = {group.constants.gather_group for group in inputs.groups} - {""}
    measured = (_measurements(name, group, device, dtype, options) for name, group in real_groups(names))
    found = [each.costs(usual) for each in measured if each is not None]
    return reduce(_slower, found) if found else usual


def _slower(one: Costs, other: Costs) -> Costs:
    """Combine the slower latency and the slower bandwidth of two links."""
    latency, bandwidth = max(one.latency, other.latency), min(one.comm_bandwidth, other.comm_bandwidth)
    return replace(one, latency=latency, comm_bandwidth=bandwidth)


def _measurements(
    name: str, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, options: Options
) -> Measurements | None:
    """Return stored or new measurements of a process group.

    None, without measuring, if the options of any rank ask for no measurement.
    """
    known = _measured.setdefault(group, {})
    if dtype not in known:
        key, share = store.circumstances(group, device, dtype), partial(_share, name, options)
        kept = store.read(key)
        own = json.dumps(asdict(kept)) if kept else _MEASURE
        text = share(own if options.measures_costs else _REFUSE)
        if text == _REFUSE:
            return None
        if text == _MEASURE:
            found = measure(group, device, dtype)
            if group.rank() == 0:
                store.write(key, found)
            text = share(json.dumps(asdict(found)))
        known[dtype] = store.parse(json.loads(text))
    return known[dtype]


def _share(name: str, options: Options, own: str) -> str:
    """Share the first rank's text, or `_REFUSE` if any rank refuses."""

    def judge(texts: Sequence[str]) -> str:
        return _REFUSE if _REFUSE in texts else texts[0]

    return share_by([name], "forward graph", own, options.agreement_timeout_s, judge, options.progress)


def _compute_dtype(inputs: GraphInputs) -> torch.dtype:
    """Return the dtype of most elements of the unsharded parameters.

    Dtypes that are not floating, or have one byte, do not count.
    """
    numels: dict[torch.dtype, int] = {}
    for node, _ in inputs.managed_nodes():
        tensor = graph_input_example(node)
        if tensor.is_floating_point() and tensor.itemsize > 1:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel()
    return max(numels, key=lambda dtype: (numels[dtype], str(dtype)), default=torch.float32)


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
            counted.append((max(rows, default=0), tensor.numel()))
    found = _weighted_median([(rows, weight) for rows, weight in counted if rows])
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
    ordered: Sequence[tuple[int, int]] = sorted(counted)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return 0
