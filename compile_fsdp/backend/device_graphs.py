"""Capture compiled graphs as device graphs (CUDA graphs), and replay them.

[Note: Fixed addresses]
A device graph reads and writes the addresses of its capture. Sharded parameters, buffers, and results of other device
graphs stay where they are, and are read there. Every other input is copied to a buffer first. Which inputs stay is
measured: those at the same address in two runs. Each run compares the addresses again, so an input that has moved is
found, and is copied from then on. Parameters that stay unsharded between two graphs keep their memory between steps
(`passes/post_grad/make_replayable.py`). If eager code frees it, `allocate_kept` allocates it again.

[Note: Results of a replay]
A replay overwrites the results of the previous replay. So results that leave the compiled graph, such as gradients, are
copied. Values that a forward saves for its backward are not: while anything holds them, the graph runs without a
replay. Both ways issue the same collectives, so ranks may choose differently.

[Note: Memory of a capture]
Each capture has a memory pool of its own. In a shared pool, a capture takes memory that an earlier capture has used for
temporaries, and a later replay of the earlier one would overwrite saved values of the later one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx

from compile_fsdp.backend.capturable import check_capturable
from compile_fsdp.backend.derived_backward import PlainOutputCode
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.torch_compat.dispatch import count_holders
from compile_fsdp.torch_compat.inductor import graph_input_position, graph_saved_outputs

_log = logging.getLogger("compile_fsdp")

# Most captures of one graph: one that needs more has inputs that keep moving, and runs without a CUDA graph. A capture
# that has served many steps does not count.
_MOST_CAPTURES = 4
_MANY_REPLAYS = 100

# Most combinations of sizes for which one graph is captured, because each capture has memory of its own.
_MOST_SIZES = 8


def compile_replayed(
    compile_inner: Callable[..., Any], inputs: GraphInputs, what: str, gm: fx.GraphModule, *args: Any, **kwargs: Any
) -> Any:
    """Compile a graph by Inductor's inner compiler; its second run captures it, and later runs replay it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    tensors = map(find_fake_tensor, placeholders)
    device = next((each.device for each in tensors if each is not None and each.device.type != "cpu"), None)
    if device is None:
        return compile_inner(gm, *args, **kwargs)
    check_capturable(gm.graph, what)
    saved = graph_saved_outputs(gm.graph.output_node())
    parameters = frozenset(i for i, node in enumerate(placeholders) if graph_input_position(node) in inputs.managed)
    return ReplayedCode(compile_inner(gm, *args, **kwargs), device, parameters, saved, what)


class ReplayedCode(PlainOutputCode):
    """A compiled graph, with a capture for each combination of sizes."""

    def __init__(
        self, code: Any, device: torch.device, parameters: frozenset[int], saved: Collection[int], what: str
    ) -> None:
        self.code = code  # takes its inputs as one list, and empties the list
        self.device = device
        self.parameters = parameters  # positions of the unsharded parameters in the inputs
        self.saved = saved  # positions of the results that only the backward reads
        self.what = what  # the graph's name in messages
        self._runs: dict[tuple[Any, ...], _Runs] = {}

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        sizes = tuple(each for each in inputs if isinstance(each, (int, float)))
        if sizes not in self._runs:
            if len(self._runs) >= 4 * _MOST_SIZES:  # forget sizes that have been seen once
                self._runs = {each: runs for each, runs in self._runs.items() if runs.capture is not None}
            self._runs[sizes] = _Runs(self)
        return self._runs[sizes](inputs)

    def may_capture(self) -> bool:
        """Whether a further combination of sizes may be captured."""
        if sum(runs.capture is not None for runs in self._runs.values()) < _MOST_SIZES:
            return True
        _warn_of_sizes(self.what)
        return False


@cache
def _warn_of_sizes(what: str) -> None:
    text = "a %s runs without a CUDA graph: it is already captured for %d other combinations of sizes"
    _log.warning(text, what, _MOST_SIZES)


class _Runs:
    """The runs of a graph with inputs of equal sizes."""

    def __init__(self, graph: ReplayedCode) -> None:
        self.graph = graph
        self._addresses: list[int] | None = None  # of the inputs of the last run
        self._moving: set[int] = set()  # positions of inputs that were at several addresses
        self.capture: _Capture | None = None
        self._captures_left = _MOST_CAPTURES
        _all_runs.add(self)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        addresses, before = [each.data_ptr() if isinstance(each, Tensor) else 0 for each in inputs], self._addresses
        self._addresses = addresses
        if self.capture is None and before is not None and self._captures_left and self.graph.may_capture():
            self._begin(inputs, addresses, before)
        if self.capture is None or self.capture.is_in_use() or self._has_moved(self.capture, addresses):
            results: Sequence[Any] = self.graph.code(inputs)
            return results
        return self.capture.replay(inputs)

    def _begin(self, inputs: list[Any], addresses: list[int], before: list[int]) -> None:
        self._captures_left -= 1
        stays = [now == then for now, then in zip(addresses, before, strict=True)]
        fixed = {i for i, stay in enumerate(stays) if stay or i in self.graph.parameters} - self._moving
        fixed |= {i for i, address in enumerate(addresses) if _find_producer(address)}
        self.capture = _Capture(self.graph, inputs, fixed)

    def _has_moved(self, capture: _Capture, addresses: list[int]) -> bool:
        """Whether an input has moved since the capture.

        The capture is then dropped, unless only results of graphs have moved that ran without a replay this time.
        """
        moved = {i for i, address in capture.fixed.items() if addresses[i] != address}
        # Parameters without memory are not read: see `allocate_kept`.
        moved -= {i for i in moved & self.graph.parameters if 0 in (addresses[i], capture.fixed[i])}
        # Results of captures that are younger, or of graphs that ran without a replay at this capture.
        moved |= {i for i in capture.copied if _find_producer(addresses[i])}
        if all(i in capture.produced and _find_producer(capture.fixed[i]) for i in moved):
            return bool(moved)
        self._moving |= {i for i in moved if not _find_producer(addresses[i])} - capture.produced
        self.capture = None
        if capture.replays >= _MANY_REPLAYS:
            self._captures_left = _MOST_CAPTURES
        if not self._captures_left:
            text = "the %s runs without a CUDA graph: %d of its inputs have moved again after %d captures"
            _log.warning(text, self.graph.what, len(moved), _MOST_CAPTURES)
        return True


class _Capture:
    """A captured graph."""

    def __init__(self, graph: ReplayedCode, inputs: list[Any], fixed: set[int]) -> None:
        tensors = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
        # By position: the address of each input that is read where it is.
        self.fixed = {i: inputs[i].data_ptr() for i in tensors if i in fixed}
        # Positions in `fixed` of results that a different capture has saved.
        self.produced = {i for i, address in self.fixed.items() if _find_producer(address)}
        self._buffers = {i: _buffer_like(inputs[i]) for i in tensors if i not in fixed}
        args = [self._buffers.get(i, each) for i, each in enumerate(inputs)]
        self.copied = self._buffers.keys()
        self.replays = 0
        self._written = [i for i in self._buffers if i in graph.code.mutated_input_idxs]
        # A result that is an input is taken from the inputs of each run.
        positions = {id(each): i for i, each in enumerate(args) if not isinstance(each, (int, float))}
        module = torch.get_device_module(graph.device)
        self._graph = module.CUDAGraph()
        # torch does not restore the current stream if a capture fails.
        current = module.stream(module.current_stream(graph.device))
        with current, module.graph(self._graph, capture_error_mode="thread_local"):
            results = graph.code([*args])
        self._positions = [positions.get(id(each)) for each in results]
        self._results = [each if i is None else None for each, i in zip(results, self._positions, strict=True)]
        self._saved = graph.saved
        kept = [each for i, each in enumerate(self._results) if i in self._saved and isinstance(each, Tensor)]
        self.addresses = {each.data_ptr() for each in kept} - {0}
        # Each saved storage of the graph's own with the number of its holders while no backward needs it.
        others = {inputs[i].untyped_storage().data_ptr() for i in self.fixed}
        storages = [each.untyped_storage() for each in kept if each.untyped_storage().data_ptr() not in others]
        self._holders = [(each, count_holders(each)) for each in storages]
        _captures.add(self)

    def is_in_use(self) -> bool:
        """Whether something holds a saved result of the last replay."""
        return any(count_holders(storage) > count for storage, count in self._holders)

    def replay(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph on inputs of which those in `fixed` have not moved; empty the list."""
        for i, buffer in self._buffers.items():
            if inputs[i].data_ptr():  # a parameter without memory is not read
                _without_repeats(buffer).copy_(_without_repeats(inputs[i]))
        taken = [None if i is None else inputs[i] for i in self._positions]
        written = [inputs[i] for i in self._written]
        self._graph.replay()
        inputs.clear()
        for i, each in zip(self._written, written, strict=True):
            if each.data_ptr():
                each.copy_(self._buffers[i])
        self.replays += 1
        pairs = zip(self._results, taken, strict=True)
        return [self._hand_out(i, result) if own is None else own for i, (result, own) in enumerate(pairs)]

    def _hand_out(self, i: int, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if i in self._saved:
            return result.detach()
        copy = _buffer_like(result)
        _without_repeats(copy).copy_(_without_repeats(result))
        return copy


_captures: WeakSet[_Capture] = WeakSet()
_all_runs: WeakSet[_Runs] = WeakSet()


def drop_captures() -> None:
    for runs in _all_runs:
        runs.capture, runs._captures_left = None, _MOST_CAPTURES


def _find_producer(address: int) -> _Capture | None:
    """Return the capture that has a result at an address."""
    return next((each for each in _captures if address in each.addresses), None)


def _buffer_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view with each element of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
