"""Calls of the Python wrapper that Inductor generates for a graph, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_fsdp.torch_compat.dispatch import HigherOrderOperator, OpOverload, storage_key

# Ops without a kernel.
_VIEWS = {"alias", "as_strided", "detach", "empty_strided", "view"}

PRODUCTS = {"addmm", "bmm", "mm"}
_COLLECTIVES = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "all_reduce_": "all-reduce"}
LAUNCHES = {**_COLLECTIVES, "offload": "offload", "fetch": "fetch"}


@dataclass(frozen=True)
class Call:
    """A call of a Triton kernel or of an op."""

    name: str  # the kernel's name, or the op's without its overload
    args: tuple[Any, ...]  # all arguments; of a kernel, without its grid
    result: Any  # what the op returns; None for a kernel
    stream: int | None  # the kernel's stream; None for an op, which runs on the current stream
    graph: int  # number

    @property
    def is_kernel(self) -> bool:
        return self.stream is not None


def events(calls: Sequence[Call], by_number: bool = False) -> list[str]:
    """List collectives, copies from and to the host, their waits, and matrix products.

    A launch has the name of its parameter group, or its number in the list. A wait has its launch's text, such as
    "wait gather layers.0".
    """
    found: list[str] = []
    launches: list[str] = []
    latest: dict[int | None, str] = {}  # launch by the storage of its result
    for call in calls:
        if call.name in LAUNCHES:
            names = [arg for arg in call.args if str(arg).startswith("FSDP::")]
            group = names[0].partition("(")[2].rstrip(")") if names else ""
            launches.append(f"{LAUNCHES[call.name]} {len(launches) if by_number else group or 'root'}")
            latest[storage_key(call.result)] = launches[-1]
            found.append(launches[-1])
        elif call.name == "wait_tensor":
            found.append(f"wait {latest[storage_key(call.args[0])]}")
        elif call.name in PRODUCTS:
            found.append(call.name)
    waits = sorted(text for text in found if text.startswith("wait"))
    assert waits == sorted(f"wait {launch}" for launch in launches if not launch.startswith("offload"))
    return found


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.graph = -1
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # reads or sets the state of the random numbers around an op
            place = next(i for i, each in enumerate(args) if isinstance(each, OpOverload))
            with self:
                result = args[place](*args[place + 1 :], **(kwargs or {}))
            return result if place else (torch.cuda.get_rng_state(), result)
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace != "prim" and name not in _VIEWS:
            self.calls.append(Call(name, (*args, *tree_leaves(kwargs)), result, None, self.graph))
        return result


_recorder: _Recorder | None = None


def record_kernel(self: Any, *args: Any, stream: int, **kwargs: Any) -> None:
    """Stand for `CachingAutotuner.run`."""
    if _recorder is not None:
        _recorder.calls.append(Call(self.inductor_meta["kernel_name"], args, None, stream, _recorder.graph))


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Record the calls of all generated wrappers that run inside the block."""
    global _recorder
    recorder = _recorder = _Recorder()
    run = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        if recorder.is_inside:  # a block that a graph calls
            return run(self, inputs)
        recorder.graph += 1
        recorder.is_inside = True
        try:
            with recorder:
                return run(self, inputs)
        finally:
            recorder.is_inside = False

    try:
        with mock.patch.object(CompiledFxGraph, "__call__", call):
            yield recorder.calls
    finally:
        _recorder = None
