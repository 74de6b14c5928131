"""Checks of a graph after every pass, with `options={"verify": True}`.

Windows        no node reads an unsharded parameter while it is freed or not filled, or its view in a different window
Sizes          every op still gives the shape and dtype that the graph has noted for it, so a collective of the wrong
               length, or a view of the wrong part, shows here
Order          every node stands behind its inputs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from compile_fsdp.errors import VerificationError
from compile_fsdp.passes.analysis.aliases import UNKNOWN, fake_arguments, fake_value
from compile_fsdp.passes.analysis.windows import Lifetimes, resized_placeholders
from compile_fsdp.torch_compat.dispatch import OpOverload, argument_aliasing, tree_leaves


@contextmanager
def checking(graph: fx.Graph, name: str) -> Iterator[None]:
    """Raise VerificationError if the pass that runs inside makes a fault; earlier faults do not count."""
    before = Counter(_find_faults(graph))
    yield
    if made := Counter(_find_faults(graph)) - before:
        raise VerificationError(
            f"expected {name} to make no faults, got: {'; '.join(made)}; leave it out with "
            f"options={{'disabled_passes': {{'{name}'}}}}, and report it"
        )


def _find_faults(graph: fx.Graph) -> Iterator[str]:
    try:
        graph.lint()
    except RuntimeError as error:
        yield f"no legal graph: {error}"
        return
    yield from _window_faults(graph)
    yield from _size_faults(graph)


def _window_faults(graph: fx.Graph) -> Iterator[str]:
    if not resized_placeholders(graph):
        return
    for parameter in Lifetimes(graph).parameters:
        for span in parameter.spans:
            if span.resize is not None and span.read_before_copy:
                yield f"{parameter.node.name} is read while it is {'freed' if span.frees else 'not filled'}"
            if span.has_stale_view:
                yield f"a view of {parameter.node.name} is used in another window than it was made in"


def _size_faults(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        target, noted = node.target, fake_value(node)
        # An op that writes would change the graph's fake tensors.
        if not isinstance(target, OpOverload) or any(each.written for each in argument_aliasing(target)):
            continue
        args, kwargs = fake_arguments((node.args, node.kwargs))
        leaves = tree_leaves((args, kwargs))
        if any(each is UNKNOWN or _is_symbolic(each) for each in [*leaves, *tree_leaves(noted)]):
            continue
        if not any(isinstance(each, torch.Tensor) for each in leaves):
            continue  # Without a fake argument, the op would make a real tensor.
        try:
            given = target(*args, **kwargs)
        except RuntimeError as error:
            yield f"{node.name} cannot run: {error}"
            continue
        if _describe(given) != _describe(noted):
            yield f"{node.name} gives {_describe(given)}, noted is {_describe(noted)}"


def _is_symbolic(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(isinstance(size, int) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _describe(value: object) -> list[str]:
    tensors = (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))
    return [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors]
