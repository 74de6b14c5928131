"""Move every read of an unsharded parameter into a filled window.

Precondition  a backward graph, as Dynamo traces it from compiled autograd: the parameter has one value in it
Match         reads before the first fill of a parameter that arrives freed; reads after a resize(0)
Rewrite       those reads, and nodes that depend on them, sink behind the fill; resize(0) is delayed behind them
Report        nodes sunk and frees delayed; FQN and reason of every parameter with reads that stay

    before                                    after
    h = linear(x, weight)                     resize_storage_bytes_(weight, 16)
    resize_storage_bytes_(weight, 16)         copy_(weight, gathered)
    copy_(weight, gathered)                   h = linear(x, weight)
    resize_storage_bytes_(weight, 0)          g = mm(grad, weight)
    g = mm(grad, weight)                      resize_storage_bytes_(weight, 0)

[Note: Recomputed reads do not wait for the fill]
An activation checkpoint recomputes forward ops in the backward. These ops read the parameter that a hook of the
backward fills. Nothing but the storage ties the read and the fill together, so a trace may have them in either order.
This pass runs before AOTAutograd, which keeps the order of reads and writes of an input from then on.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from compile_fsdp.passes.analysis.eager_effects import is_input, is_passed_through, is_version_op
from compile_fsdp.passes.analysis.effects import find_resizes, parameter_of
from compile_fsdp.passes.analysis.layout import is_free
from compile_fsdp.passes.analysis.sinking import Move, Scan, Sinking
from compile_fsdp.passes.report import LegalizeReport, Names, Unmoved, node_name


def legalize_windows(graph: fx.Graph, names: Names = node_name) -> LegalizeReport:
    """Reorder a Dynamo-level backward so that all parameter reads lie in windows."""
    nodes = {node for node in map(parameter_of, find_resizes(graph)) if node is not None and is_input(node)}
    if not nodes:
        return LegalizeReport(0, 0, ())
    scan = Scan(graph, nodes)
    sinking = Sinking(scan)
    for position, node in enumerate(graph.nodes):
        sinking.visit(position, node)
    sunk = [] if sinking.faults else sinking.moves
    _move(sunk)
    delays = _find_delays(graph, scan)  # After the sinking, which may put reads behind a free.
    faults = sinking.faults | {node: Unmoved.MUTATED for node in delays if node in scan.mutated}
    delayed = [move for node, moves in delays.items() if node not in faults for move in moves]
    _move(delayed)
    return LegalizeReport(
        nodes_sunk=len(sunk),
        frees_delayed=len(delayed),
        unmoved=tuple((names(node), reason) for node, reason in faults.items()),
    )


def _find_delays(graph: fx.Graph, scan: Scan) -> dict[fx.Node, list[Move]]:
    """Return, by parameter, the moves of each resize(0) behind the last read before the next resize or fill."""
    freed: dict[fx.Node, fx.Node] = {}
    last_read: dict[fx.Node, fx.Node] = {}
    delays: dict[fx.Node, list[Move]] = {}

    def end_gap(parameter: fx.Node) -> None:
        free, read = freed.pop(parameter, None), last_read.pop(parameter, None)
        if free is not None and read is not None:
            delays.setdefault(parameter, []).append((free, read))

    for node in graph.nodes:
        if node.op == "output" or is_version_op(node) or is_passed_through(node):
            continue
        event = scan.find_event(node)
        for parameter in scan.aliased_by(node.all_input_nodes):
            if parameter is not event:
                last_read[parameter] = node
        if event is not None:
            end_gap(event)
            if is_free(node):
                freed[event] = node
    for parameter in list(freed):
        end_gap(parameter)
    return delays


def _move(moves: Iterable[Move]) -> None:
    """Make the moves; nodes with one target keep their order."""
    last: dict[fx.Node, fx.Node] = {}
    for node, behind in moves:
        last.get(behind, behind).append(node)
        last[behind] = node
