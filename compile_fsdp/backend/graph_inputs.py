"""The inputs of a Dynamo graph, with the unsharded parameters and their names."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from compile_fsdp.advice import GroupFigures
from compile_fsdp.errors import NotShardedError, UnsupportedFeatureError
from compile_fsdp.passes.analysis.eager_effects import is_embedding, is_upkeep
from compile_fsdp.passes.analysis.parameter_writes import find_refused_writes
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.passes.analysis.unfilled_reads import find_unfilled_reads
from compile_fsdp.passes.text import count, list_names
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.gather import free
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.module import belongs_to_traceable
from compile_fsdp.runtime.reduction import process_groups
from compile_fsdp.torch_compat.distributed import name_in_graphs, resolve_group
from compile_fsdp.torch_compat.dynamo import graph_input_example, input_fqn
from compile_fsdp.torch_compat.fsdp import unsharded_dtype
from compile_fsdp.torch_compat.inductor import graph_input_position
from compile_fsdp.wrap.tree import ROOT

_log = logging.getLogger("compile_fsdp")


class GraphInputs:
    """The inputs of one graph, counted as the inner compiler sees them.

    Compiled autograd passes its tensors as one list, whose items the inner compiler sees as separate inputs.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.managed: dict[int, TraceableGroup] = {}  # by position: the group of each unsharded parameter
        self._fqns: dict[int, str] = {}
        self.parts: list[int] = []  # positions in `managed` of parts of tensor subclasses
        self._positions: dict[fx.Node, int] = {}
        self._parameters: dict[str, nn.Parameter] = {}  # by FQN, those of no group
        flat: list[Any] = []
        for node in gm.graph.find_nodes(op="placeholder"):
            self._positions[node] = len(flat)
            example = graph_input_example(node)
            if isinstance(example, nn.Parameter) and owner_of(example) is None:
                self._parameters[input_fqn(node)] = example
            flat += example if isinstance(example, list) else [example]
        for position, example in enumerate(flat):
            if (group := owner_of(example)) is not None:
                self.managed[position] = group
                self._fqns[position] = group.fqn(example)
                if group.param_of(example).unsharded_param is not example:
                    self.parts.append(position)

    @property
    def groups(self) -> list[TraceableGroup]:
        """The groups in `managed`, each once, in the order of the inputs."""
        return list(dict.fromkeys(self.managed.values()))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(group.constants.text for group in self.groups)

    def process_groups(self) -> list[str]:
        """Return the graph names of the process groups for gathers and reductions."""
        found = (each for group in self.groups for each in process_groups(group.fsdp_group) if each is not None)
        return sorted({name_in_graphs(each) for each in found})

    def managed_nodes(self) -> list[tuple[fx.Node, TraceableGroup]]:
        """Return the placeholders that are unsharded parameters, with their groups."""
        positions = self._positions.items()
        return [(node, self.managed[position]) for node, position in positions if position in self.managed]

    def frozen_nodes(self) -> list[fx.Node]:
        """Return the placeholders of unsharded parameters that need no gradient."""
        examples = ((node, group, graph_input_example(node)) for node, group in self.managed_nodes())
        return [node for node, group, example in examples if not group.param_of(example).unsharded_param.requires_grad]

    def read_positions(self) -> frozenset[int]:
        """Return the positions in `managed` of parameters that the graph computes with, not only fills and frees."""
        read = (node for node, _ in self.managed_nodes() if not all(map(is_upkeep, node.users)))
        return frozenset(self._positions[node] for node in read)

    def figures(self, left_unsharded: Collection[TraceableGroup]) -> tuple[GroupFigures, ...]:
        """Return the sizes of a forward graph's groups, in input order, for its report.

        The backward gathers neither the groups in `left_unsharded` nor those whose parameters the graph reads only in
        embeddings, whose backward does not read them.
        """
        nodes = self.managed_nodes()
        read = {group for node, group in nodes if not all(is_upkeep(each) or is_embedding(each) for each in node.users)}
        return tuple(_figures(group, group in left_unsharded or group not in read) for group in self.groups)

    def unfilled_positions(self, graph: fx.Graph) -> list[int]:
        """Return the positions in `managed` that a backward graph, as Dynamo has traced it, reads and never fills."""
        items = [user for node in self._positions for user in node.users if user.target is operator.getitem]
        managed = [node for node in (*self._positions, *items) if self._position(node) in self.managed]
        return [self._position(node) for node in find_unfilled_reads(graph, managed)]

    def positions_of(self, fqns: Collection[str]) -> list[int]:
        """Return the positions in `managed` of the parameters with these FQNs."""
        return [position for position in self.managed if self._fqns[position] in fqns]

    def gathers(self, positions: Iterable[int]) -> CollectiveSequence:
        """Return the all-gathers outside the graph for parameters at these positions."""
        groups = dict.fromkeys(self.managed[position] for position in positions)
        calls = [
            (f"all-gather of {group.fsdp_group._module_fqn or 'the root'}, unless it is unsharded", name)
            for group in groups
            if (name := group.constants.gather_group)
        ]
        return CollectiveSequence(tuple(calls))

    def name_before(self, node: fx.Node) -> str:
        """Return the FQN of the parameter that a Dynamo graph's placeholder, or an item of it, is; else its name."""
        return self._fqns.get(self._position(node), node.name)

    def _position(self, node: fx.Node) -> int:
        source, item = node.args if node.op == "call_function" else (node, 0)
        assert isinstance(source, fx.Node) and isinstance(item, int)
        return self._positions[source] + item

    def name(self, node: fx.Node) -> str:
        """Return the FQN of the parameter that the inner compiler's placeholder is; else the node's name."""
        position = graph_input_position(node)
        return node.name if position is None else self._fqns.get(position, node.name)

    def check_writes(self, gm: fx.GraphModule) -> None:
        """Refuse a forward with writes to gathered parameters that the compiled graph would lose, or crash on."""
        written = find_refused_writes(gm, [node for node, _ in self.managed_nodes()], free)
        if written:
            names = ", ".join(sorted(self.name_before(node) for node in written))
            raise UnsupportedFeatureError(
                f"expected a forward that leaves its sharded parameters as they are, got one that writes {names} in "
                "place, and FSDP2 would drop the write with the gathered parameter; compute with a new tensor, such as "
                "weight = normalize(self.weight) in place of self.weight.copy_(...), and normalize an embedding's rows "
                "behind the lookup in place of max_norm"
            )

    def check_sharded(self) -> None:
        """Refuse a graph with parameters of a model that is not sharded."""
        if foreign := self._foreign():
            raise NotShardedError(
                f"expected a sharded model, got a graph with the {count(len(foreign), 'parameter')} "
                f"{list_names(foreign)} of a model that was never made traceable; shard it with "
                "compile_fsdp.fully_shard(), or call compile_fsdp.make_traceable() on one that is sharded"
            )

    def warn_of_unreduced(self) -> None:
        """Log a warning if the graph reads trainable parameters outside of every sharded module."""
        foreign = self._foreign().items()
        found = [fqn for fqn, each in foreign if each.requires_grad and not isinstance(each, DTensor)]
        if found and any(resolve_group(name).size() > 1 for name in self.process_groups()):
            _log.warning(
                "the gradients of %s are not reduced, because no sharded module holds them, and each rank trains them "
                "differently: call fully_shard() on the whole model as well, after its blocks",
                list_names(found),
            )

    def _foreign(self) -> dict[str, nn.Parameter]:
        """Parameters of no group that no traceable module ignores, by FQN."""
        return {fqn: each for fqn, each in self._parameters.items() if not belongs_to_traceable(each)}


def _figures(group: TraceableGroup, is_once: bool) -> GroupFigures:
    fsdp_group, ranks = group.fsdp_group, group.constants.shard_count
    reduce_dtype = fsdp_group._reduce_dtype
    numels = [(param, param.layout.numel * ranks) for param in group.params]
    is_once = is_once or fsdp_group.post_forward_mesh_info is None or not fsdp_group.unshard_in_backward
    again = group.constants.post_forward_count if fsdp_group._use_post_forward_mesh else ranks
    return GroupFigures(
        name=fsdp_group._module_fqn or ROOT,
        unsharded=tuple(numel * unsharded_dtype(param.fsdp_param).itemsize for param, numel in numels),
        reduced=tuple(
            numel * (reduce_dtype or unsharded_dtype(param.fsdp_param)).itemsize
            for param, numel in numels
            if param.fsdp_param.sharded_param.requires_grad
        ),
        factors=sum(numel for param, numel in numels if len(param.layout.shard_size) > 1),
        ranks=ranks,
        backward_ranks=1 if is_once else again,
    )
