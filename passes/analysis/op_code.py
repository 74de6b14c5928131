"""Find the Python code of the custom ops and Triton kernels in a graph.

Dynamo does not trace the code of a `torch.library.custom_op`, but AOTAutograd traces its backward into a graph. The
keys of torch's caches contain the names of ops, not their code (https://github.com/pytorch/pytorch/issues/144344).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

from torch import fx

from compile_fsdp.passes.analysis.function_text import codes_in, is_library
from compile_fsdp.torch_compat.dispatch import op_definitions


def op_code(gm: fx.GraphModule) -> tuple[CodeType, ...]:
    """Return the code of the ops in a graph and its bodies, and of the functions and classes that it names."""
    graphs = [each.graph for each in gm.modules() if isinstance(each, fx.GraphModule)]
    return tuple(_code_behind(each for graph in graphs for node in graph.nodes for each in op_definitions(node)))


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
