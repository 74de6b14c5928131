"""Read the gathered value instead of copying it into the unsharded parameter.

Precondition  the window closes in this graph, makes room for the whole parameter, and fills it once, before any
              read, with a value of equal layout; nothing else writes parameter or value; no view leaves the window
Match         resize(full) -> copy_ -> readers -> resize(0), any number of times per parameter
Rewrite       readers take the copy's source; the two resizes and the copy are erased
Report        windows, copies and resizes removed; FQN and Kept reason of every window left alone

    before                                    after
    resize_storage_bytes_(weight, 16)
    copy_(weight, gathered)
    y = linear(x, weight)                     y = linear(x, gathered)
    resize_storage_bytes_(weight, 0)
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.effects import get_argument
from compile_fsdp.passes.analysis.layout import find_copy_fault, size_hint
from compile_fsdp.passes.analysis.subgraphs import find_window_subgraphs
from compile_fsdp.passes.analysis.windows import Lifetimes, Parameter, Span, resized_placeholders
from compile_fsdp.passes.report import Kept, Names, WindowReport, node_name
from compile_fsdp.torch_compat.inductor import MUTATION_REGION_KEY


def remove_unshard_copies(graph: fx.Graph, names: Names = node_name) -> WindowReport:
    """Remove complete windows from a functionalized graph and its subgraphs.

    `names`: parameter FQN of a placeholder of `graph`; a placeholder of a subgraph goes by its node's name.
    """
    subgraphs = find_window_subgraphs(graph)
    graphs = [*(module.graph for _, module in subgraphs), graph]
    nodes_before = sum(len(each.nodes) for each in graphs)
    removed: list[int] = []  # bytes of each window
    kept: list[tuple[str, Kept]] = []
    # Subgraphs first, because a higher-order op without windows no longer writes its operands.
    for path, module in subgraphs:
        windows = _remove_windows(module.graph, _below(path), kept)
        if windows:
            module.recompile()
        removed += windows
    removed += _remove_windows(graph, names, kept)
    return WindowReport(
        name=remove_unshard_copies.__name__,
        windows_removed=len(removed),
        copies_removed=len(removed),
        resizes_removed=2 * len(removed),
        bytes_removed=sum(removed),
        kept=tuple(kept),
        nodes_before=nodes_before,
        nodes_after=sum(len(each.nodes) for each in graphs),
    )


def _below(path: str) -> Names:
    return lambda node: f"{path}.{node.name}"


def _remove_windows(graph: fx.Graph, names: Names, kept: list[tuple[str, Kept]]) -> list[int]:
    """Return the bytes of each window removed from one graph, and add the windows left in it to `kept`."""
    windows = _match(graph, names, kept) if resized_placeholders(graph) else []
    for parameter, index in windows:
        _rewrite(graph, parameter, index)
    if windows:
        # Inductor matches no pattern across a mutation, so it must count the mutations again without the windows.
        for node in graph.nodes:
            node.meta.pop(MUTATION_REGION_KEY, None)
    return [size_hint(parameter.spans[index].size_bytes) for parameter, index in windows]


def _match(graph: fx.Graph, names: Names, kept: list[tuple[str, Kept]]) -> list[tuple[Parameter, int]]:
    """Return each window to remove: its parameter, and the number of the span that it fills."""
    lifetimes = Lifetimes(graph)
    windows = []
    for parameter in lifetimes.parameters:
        parameter_fault = _find_parameter_fault(parameter)
        for index, span in enumerate(parameter.spans):
            is_window = span.resize is not None and not span.frees and span is not parameter.spans[-1]
            if is_window:
                fault = parameter_fault or _find_window_fault(parameter, index, lifetimes)
            else:
                fault = _find_open_end(parameter, index)
            if fault is not None:
                kept.append((names(parameter.node), fault))
            elif is_window:
                windows.append((parameter, index))
    return windows


def _find_open_end(parameter: Parameter, index: int) -> Kept | None:
    """Return the reason to report a span without a closed window, if it needs a report."""
    span = parameter.spans[index]
    if span.resize is None:
        return Kept.OPEN_AT_START if parameter.spans[index + 1].frees else None
    if not span.frees:
        return Kept.OPEN_AT_RETURN
    previous = parameter.spans[index - 1]
    return Kept.DOUBLE_FREE if previous.frees else None


def _find_parameter_fault(parameter: Parameter) -> Kept | None:
    """Return why none of the parameter's windows can be removed."""
    if parameter.shares_storage:
        return Kept.SHARED_STORAGE
    arrives_filled = parameter.spans[1].frees
    for span in parameter.spans:
        in_window = arrives_filled if span.resize is None else not span.frees
        if (span.copies or span.readers) and not in_window:
            return Kept.COPY_OUTSIDE if span.copies else Kept.READ_OUTSIDE
    return None


def _find_window_fault(parameter: Parameter, index: int, lifetimes: Lifetimes) -> Kept | None:
    previous, span, following = parameter.spans[index - 1 : index + 2]
    # See [Note: A window starts freed] for a window without a resize before.
    neighbours_free = following.frees and (previous.resize is None or previous.frees)
    faults = {
        Kept.NOT_FULL: not span.full,
        Kept.REFILLED: not neighbours_free,
        Kept.RESULT_USED: any(node is not None and node.users for node in (span.resize, *span.copies)),
        Kept.NO_COPY: not span.copies,
        Kept.TWO_COPIES: len(span.copies) > 1,
        Kept.READ_BEFORE_COPY: span.read_before_copy,
        Kept.MUTATED: span.mutated,
        Kept.VIEW_OUTLIVES: span.has_stale_view,
        Kept.VIEW_ESCAPES: span.view_escapes,
        Kept.CHAINED: span.fills_another,
        Kept.READ_BY_STORAGE: span.read_by_storage,
    }
    fault = next((reason for reason, applies in faults.items() if applies), None)
    return fault or _find_value_fault(parameter, span, lifetimes)


def _find_value_fault(parameter: Parameter, span: Span, lifetimes: Lifetimes) -> Kept | None:
    value = get_argument(span.copies[0], 1, "data")
    if fault := find_copy_fault(find_fake_tensor(parameter.node), find_fake_tensor(value)):
        return fault
    assert isinstance(value, fx.Node), "it has a fake value"
    classes = lifetimes.aliases.classes(value)
    if not lifetimes.resized.isdisjoint(classes):
        return Kept.VALUE_RESIZED
    writes = (position for key in classes for position in lifetimes.writes.get(key, ()))
    if any(span.filled_at < position < span.end for position in writes):
        return Kept.VALUE_MUTATED
    return None


def _rewrite(graph: fx.Graph, parameter: Parameter, index: int) -> None:
    span, following = parameter.spans[index : index + 2]
    value = get_argument(span.copies[0], 1, "data")
    assert isinstance(value, fx.Node), "the window has been checked"
    for reader in span.readers:
        reader.replace_input_with(parameter.node, value)
    for node in (following.resize, span.copies[0], span.resize):
        assert node is not None, "the window has been checked"
        graph.erase_node(node)
