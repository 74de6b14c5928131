"""Find the Python code that shapes a graph and that Dynamo does not trace.

* AOTAutograd traces the backward of a `torch.library.custom_op` into a graph. The keys of torch's caches contain the
  names of ops, not their code (https://github.com/pytorch/pytorch/issues/144344).
* AOTAutograd calls the `context_fn` of a selective checkpoint. torch stores no graph with one, unless it has an
  attribute `cache_hash`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import fx

from compile_fsdp.passes.analysis.function_text import codes_in, function_text, is_library
from compile_fsdp.passes.analysis.subgraphs import graph_and_bodies
from compile_fsdp.torch_compat.dispatch import CHECKPOINT_CONTEXTS, op_definitions


class UntracedCode(NamedTuple):
    """Code of one graph and its bodies."""

    # Of custom ops and Triton kernels, and of the functions and classes that these name.
    ops: tuple[CodeType, ...] = ()
    # The user's functions that make the contexts of selective checkpoints, without the arguments of a partial.
    contexts: tuple[object, ...] = ()


def find_untraced_code(gm: fx.GraphModule) -> UntracedCode:
    graphs = graph_and_bodies(gm)
    definitions = [each for graph in graphs for node in graph.graph.nodes for each in op_definitions(node)]
    functions = dict.fromkeys(_function_of(body.meta.get(CHECKPOINT_CONTEXTS)) for body in graphs)
    own = [each for each in functions if each is not None and not (isinstance(each, FunctionType) and is_library(each))]
    return UntracedCode(tuple(_code_behind(definitions)), tuple(own))


class NamedContexts:
    """A user's `context_fn` with its text, which stands for it in keys of torch's caches."""

    def __init__(self, contexts: Callable[[], Any], text: str) -> None:
        self.contexts, self.cache_hash = contexts, text

    def __call__(self) -> Any:
        return self.contexts()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.cache_hash,)


def name_contexts(gm: fx.GraphModule) -> None:
    """Name each `context_fn` that has a text, unless the user has given it a `cache_hash`."""
    for body in graph_and_bodies(gm):
        contexts = body.meta.get(CHECKPOINT_CONTEXTS)
        text = function_text(contexts)
        if callable(contexts) and text is not None and not hasattr(contexts, "cache_hash"):
            body.meta[CHECKPOINT_CONTEXTS] = NamedContexts(contexts, text)


def _code_behind(definitions: Iterable[object]) -> Iterator[CodeType]:
    rest = list(definitions)
    seen: set[int] = set()
    while rest:
        value = _function_of(rest.pop())
        if not isinstance(value, (FunctionType, type)) or id(value) in seen or is_library(value):
            continue
        seen.add(id(value))
        if isinstance(value, type):
            rest += vars(value).values()
        else:
            yield value.__code__
            rest += _named(value)


def _function_of(value: object) -> object:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, partial):
        return value.func
    while type(value).__module__.partition(".")[0] == "triton" and hasattr(value, "fn"):  # an autotuner, or a kernel
        value = value.fn
    return value


def _named(function: FunctionType) -> Iterator[object]:
    """Yield the variables that a function closes over, the globals it names, and what it names of modules."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable without a value
            continue
    names = {name for code in codes_in(function.__code__) for name in code.co_names}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value).get(name) for name in names)
