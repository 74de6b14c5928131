"""Keep saved activations in host memory between forward and backward.

Precondition  both halves of a joint graph from AOTAutograd's partitioner, with the marks of `fit_memory_budget`
Match         results of marked ops that the forward returns for the backward alone, and that are no views
Rewrite       each result is offloaded behind its last use, the forward returns the host copy instead, and the backward
              fetches it before its first use
Report        number of offloaded tensors

    before                                    after
    forward   h = mm(x, w)                    h = mm(x, w)
              y = gelu(h)                     y = gelu(h)
              return y, h                     away = offload(h, [], True)
                                              return y, away
    backward  g = gelu_backward(dy, h)        h = wait_tensor(fetch(away, "cuda:0"))
                                              g = gelu_backward(dy, h)
"""

from __future__ import annotations

from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes.analysis.aliases import find_fake_tensor, get_fake_tensor, is_declared_view
from compile_fsdp.passes.analysis.collectives import WAIT, insert
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.torch_compat.dynamo import least_offloaded_bytes


def offload_saved(forward: fx.Graph, backward: fx.Graph, results: int) -> int:
    """Offload the marked tensors and return their number.

    `forward` returns the user's results, `results` in number, and then the saved tensors. `backward` takes these under
    equal names.
    """
    output = forward.output_node()
    returned = output.args[0]
    assert isinstance(returned, (tuple, list))
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    saved = dict.fromkeys(node for node in returned[results:] if isinstance(node, fx.Node) and node.name in inputs)
    own = set(returned[:results])
    leaving = [each for each in saved if each not in own and _leaves(each)]
    if not leaving:
        return 0
    last = _find_last_uses(forward)
    leaving.sort(key=last.__getitem__)
    away: dict[fx.Node, fx.Node] = {}
    sent: list[fx.Node] = []
    for node in leaving:
        is_behind = sent and last[sent[0]] is last[node]
        with forward.inserting_after(away[sent[0]] if is_behind else last[node]):
            away[node] = insert(forward, ops.offload, node, sent, node is leaving[-1], like=node)
        sent = [node]
        _fetch(inputs[node.name], away[node])
    output.args = (tuple(away.get(each, each) for each in returned),)  # type: ignore[arg-type]  # None and numbers, too
    return len(leaving)


def _leaves(node: fx.Node) -> bool:
    least, tensor = least_offloaded_bytes(node), find_fake_tensor(node)
    if least is None or tensor is None or is_declared_view(node):
        return False
    return size_hint(tensor.numel()) * tensor.itemsize >= least


def _find_last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the last reader of it or its views, the return excluded, or else to itself."""
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        read = [last[user] if is_declared_view(user) else user for user in node.users if user.op != "output"]
        last[node] = max([node, *read])
    return last


def _fetch(saved: fx.Node, away: fx.Node) -> None:
    """Let the backward take the host copy `away`, and fetch it before its first use."""
    users, device = set(saved.users), get_fake_tensor(saved).device
    if not users:
        return
    first = next(node for node in saved.graph.nodes if node in users)
    saved.meta["val"] = away.meta["val"]
    with saved.graph.inserting_before(first):
        launched = insert(saved.graph, ops.fetch, saved, device, like=saved)
        fetched = insert(saved.graph, WAIT, launched, like=saved)
    saved.replace_all_uses_with(fetched, lambda user: user in users)
