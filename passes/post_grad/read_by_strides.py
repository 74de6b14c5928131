"""Read convolution weights of windows in a layout that Inductor leaves alone.

Precondition  a post-grad graph, with the windows that `remove_unshard_copies` has left
Match         four-dimensional inputs that the graph resizes
Rewrite       nodes that compute with such an input read it by `as_strided`
Report        reads rewritten

    before                                    after
    resize_storage_bytes_(weight, 64)         resize_storage_bytes_(weight, 64)
    copy_(weight, gathered)                   copy_(weight, gathered)
                                              w = as_strided(weight, [1, 1, 4, 4], [16, 16, 4, 1], 0)
    y = convolution(x, weight)                y = convolution(x, w)

Inductor prefers convolutions with channels last. It copies a weight among the graph's inputs to that layout where the
graph begins, before the weight is filled, and reads only the copy: the program ends with a segmentation fault. A weight
read by `as_strided` is copied where it is read. (2.13.0)
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.collectives import aten, insert
from compile_fsdp.passes.analysis.effects import is_copy, is_resize
from compile_fsdp.passes.report import PassCounts


def read_by_strides(graph: fx.Graph) -> PassCounts:
    """Let nodes read a resized convolution weight by `as_strided`."""
    nodes, reads = len(graph.nodes), 0
    for weight in graph.find_nodes(op="placeholder"):
        tensor = find_fake_tensor(weight)
        if tensor is None or tensor.ndim != 4 or not any(map(is_resize, weight.users)):
            continue
        for reader in list(weight.users):
            is_upkeep = is_resize(reader) or is_copy(reader)
            if is_upkeep or reader.op != "call_function" or reader.target is aten.as_strided.default:
                continue
            with graph.inserting_before(reader):
                layout = [*tensor.shape], [*tensor.stride()], tensor.storage_offset()
                read = insert(graph, aten.as_strided.default, weight, *layout, like=weight)
            reader.replace_input_with(weight, read)
            reads += 1
    return PassCounts(read_by_strides.__name__, nodes, len(graph.nodes), (("reads_rewritten", reads),))
