"""Capture compiled graphs as device graphs (CUDA graphs), and replay them.

[Note: Fixed addresses]
A device graph reads and writes the addresses of its capture. Sharded parameters, buffers, and results of other device
graphs stay where they are, and are read there. Every other input is copied to a buffer first. Which inputs stay is
measured: those at the same address in two runs. Each run compares the addresses again, so an input that has moved is
found, and is copied from then on. Parameters that stay unsharded between two graphs are allocated once and never freed:
see `passes/post_grad/keep_memory.py`.

[Note: Results of a replay]
A replay overwrites the results of the previous replay. So results that leave the compiled graph, such as gradients, are
copied. Values that a forward saves for its backward are not: while anything holds them, the graph runs without a
replay. Both ways issue the same collectives, so ranks may choose differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx

from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.prefill import owners_of
from compile_fsdp.errors import UnknownOptionError, UnsupportedFeatureError
from compile_fsdp.ops import offload
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.report import Kept
from compile_fsdp.passes.text import count, list_names
from compile_fsdp.reports import GraphReport
from compile_fsdp.torch_compat.device_graphs import alias_memory, has_device_graphs
from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.inductor import graph_input_position, graph_output_positions, inductor_output_type

_log = logging.getLogger("compile_fsdp")

_OutputCode: Any = inductor_output_type()

# Windows that graphs open or close for each other. Their parameters may stay allocated.
_BETWEEN_GRAPHS = {Kept.OPEN_AT_START.value, Kept.OPEN_AT_RETURN.value}

# Captures of one graph, after which it runs without: an input moves in every step.
_MOST_CAPTURES = 4

# Combinations of sizes for which one graph is captured; each capture has memory of its own.
_MOST_SIZES = 8


class GraphCapturer:
    """Inductor's inner compiler, whose compiled graphs are captured by their second run and replayed from then on."""

    def __init__(self, compile_inner: Callable[..., Any], inputs: GraphInputs, what: str) -> None:
        self.compile_inner = compile_inner
        self.inputs = inputs
        self.what = what

    def __call__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        tensors = map(find_fake_tensor, gm.graph.find_nodes(op="placeholder"))
        device = next((each.device for each in tensors if each is not None and each.device.type != "cpu"), None)
        returned = [position is not None for position in graph_output_positions(gm.graph.output_node())]
        if device is not None:
            self._check(gm.graph)
        placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
        parameters = [i for i, node in placeholders if graph_input_position(node) in self.inputs.managed]
        code = self.compile_inner(gm, *args, **kwargs)
        return code if device is None else ReplayedCode(code, device, frozenset(parameters), returned, self.what)

    def _check(self, graph: fx.Graph) -> None:
        """Refuse what only the host can do, and what reads the host's memory."""
        called = {_called_op(node) for node in graph.nodes}
        found = [text for op, text in _HOST_OPS.items() if op in called]
        if on_host := [node for node in graph.find_nodes(op="placeholder") if node.users and _is_on_host(node)]:
            found.append(f"{count(len(on_host), 'tensor')} on the CPU among its inputs, such as sharded parameters")
        if found:
            raise UnsupportedFeatureError(
                f"expected a {self.what} that a CUDA graph can replay, got one with {' and '.join(found)}; leave these "
                'out, or compile without CUDA graphs, such as with mode="max-autotune-no-cudagraphs"'
            )


# By op that runs code of the host: its cause.
_HOST_OPS = {
    torch.ops.compile_fsdp.hand_over.default: "hooks on sharded parameters, such as an optimizer in the backward",
    offload: "activations that a memory_budget offloads",
}


def _called_op(node: fx.Node) -> Any:
    """Return the op that a node calls; a functionalized op is the node's first argument."""
    return next((each for each in node.args[:1] if isinstance(each, OpOverload)), node.target)


def _is_on_host(node: fx.Node) -> bool:
    tensor = find_fake_tensor(node)
    return tensor is not None and tensor.device.type == "cpu"


class ReplayedCode(_OutputCode):  # type: ignore[misc]
    """A compiled graph, with a capture for each combination of sizes.

    Args:
        code: The compiled graph; it takes its inputs as one list, and empties the list.
        device: The device of the graph's tensors.
        parameters: Positions of the unsharded parameters in the inputs.
        returned: By result: whether it leaves the compiled graph. All do if the list is shorter.
        what: The graph's name in messages.
    """

    _boxed_call = True

    def __init__(
        self, code: Any, device: torch.device, parameters: frozenset[int], returned: Sequence[bool], what: str
    ) -> None:
        self.code = code
        self.device = device
        self.parameters = parameters
        self.returned = returned
        self.what = what
        self._runs: dict[tuple[Any, ...], _Runs] = {}

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        sizes = tuple(each for each in inputs if isinstance(each, (int, float)))
        if (runs := self._runs.get(sizes)) is None:
            if len(self._runs) == _MOST_SIZES:
                _warn_of_sizes(self.what)
                results: Sequence[Any] = self.code(inputs)
                return results
            runs = self._runs[sizes] = _Runs(self)
        return runs(inputs)

    def prepare_for_serialization(self) -> None:
        pass

    def post_compile(self, *args: Any) -> None:
        pass

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


@cache
def _warn_of_sizes(what: str) -> None:
    _log.warning("a %s runs without a CUDA graph: its sizes differ from %d captured combinations", what, _MOST_SIZES)


class _Runs:
    """The runs of a graph with inputs of equal sizes."""

    def __init__(self, graph: ReplayedCode) -> None:
        self.graph = graph
        self._addresses: list[int] | None = None  # of the inputs of the last run
        self._moving: set[int] = set()  # positions of inputs that were at several addresses
        self._capture: _Capture | None = None
        self._captures_left = _MOST_CAPTURES

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        addresses, before = [each.data_ptr() if isinstance(each, Tensor) else 0 for each in inputs], self._addresses
        self._addresses = addresses
        if self._capture is None and before is not None and self._captures_left:
            self._begin(inputs, addresses, before)
        if self._capture is None or self._capture.is_in_use() or self._has_moved(self._capture, addresses):
            results: Sequence[Any] = self.graph.code(inputs)
            return results
        return self._capture.replay(inputs)

    def _begin(self, inputs: list[Any], addresses: list[int], before: list[int]) -> None:
        self._captures_left -= 1
        stays = [now == then for now, then in zip(addresses, before, strict=True)]
        fixed = {i for i, stay in enumerate(stays) if stay or i in self.graph.parameters} - self._moving
        fixed |= {i for i, address in enumerate(addresses) if _find_producer(address)}
        self._capture = _Capture(self.graph, inputs, fixed)

    def _has_moved(self, capture: _Capture, addresses: list[int]) -> bool:
        """Whether an input has moved since the capture.

        The capture is then dropped, unless only results of graphs have moved that ran without a replay this time.
        """
        moved = {i for i, address in capture.fixed.items() if addresses[i] != address}
        # A graph does not read a parameter that may arrive without memory.
        moved -= {i for i in moved & self.graph.parameters if 0 in (addresses[i], capture.fixed[i])}
        if all(i in capture.produced and _find_producer(capture.fixed[i]) for i in moved):
            return bool(moved)
        self._moving |= moved - capture.produced
        self._capture = None
        if not self._captures_left:
            text = "the %s runs without a CUDA graph: %d of its inputs have moved again after %d captures"
            _log.warning(text, self.graph.what, len(moved), _MOST_CAPTURES)
        return True


class _Capture:
    """A captured graph.

    Attributes:
        fixed: By position: the address of each input that is read where it is.
        produced: Positions of those that are results of other captures.
        device: The device of the graph's tensors.
        pool: Handle of the memory pool that all captures on the device share.
    """

    def __init__(self, graph: ReplayedCode, inputs: list[Any], fixed: set[int]) -> None:
        tensors = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
        self.fixed = {i: inputs[i].data_ptr() for i in tensors if i in fixed}
        self.produced = {i for i, address in self.fixed.items() if _find_producer(address)}
        self._buffers = {i: _buffer_like(inputs[i]) for i in tensors if i not in fixed}
        args = [self._buffers.get(i, each) for i, each in enumerate(inputs)]
        self._written = [i for i in self._buffers if i in graph.code.mutated_input_idxs]
        # A result that is an input is taken from the inputs of each run.
        positions = {id(each): i for i, each in enumerate(args) if not isinstance(each, (int, float))}
        self.device, module = graph.device, torch.get_device_module(graph.device)
        self._graph = module.CUDAGraph()
        pool = next((each.pool for each in _captures if each.device == self.device), None)
        with module.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            results = graph.code([*args])
        self.pool: Any = self._graph.pool()
        self._positions = [positions.get(id(each)) for each in results]
        self._results = [each if i is None else None for each, i in zip(results, self._positions, strict=True)]
        self._leaves = graph.returned if len(graph.returned) == len(results) else [True] * len(results)
        kept = (each for each, leaves in zip(self._results, self._leaves, strict=True) if not leaves)
        self.addresses = {each.data_ptr() for each in kept if isinstance(each, Tensor)} - {0}
        self._are_free: list[Callable[[], bool]] = []  # of each result that was handed out
        _captures.add(self)

    def is_in_use(self) -> bool:
        """Whether something holds a result of the last replay."""
        return not all(is_free() for is_free in self._are_free)

    def replay(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph on inputs of which those in `fixed` have not moved; empty the list."""
        for i, buffer in self._buffers.items():
            _without_repeats(buffer).copy_(_without_repeats(inputs[i]))
        taken = [None if i is None else inputs[i] for i in self._positions]
        written = [inputs[i] for i in self._written]
        inputs.clear()
        self._graph.replay()
        for i, each in zip(self._written, written, strict=True):
            each.copy_(self._buffers[i])
        self._are_free.clear()
        every = zip(self._results, taken, self._leaves, strict=True)
        return [self._hand_out(result, leaves) if own is None else own for result, own, leaves in every]

    def _hand_out(self, result: Any, leaves: bool) -> Any:
        if not isinstance(result, Tensor):
            return result
        if leaves:
            copy = _buffer_like(result)
            _without_repeats(copy).copy_(_without_repeats(result))
            return copy
        alias, is_free = alias_memory(result)
        self._are_free.append(is_free)
        return alias


_captures: WeakSet[_Capture] = WeakSet()


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


@dataclass(eq=False)
class AllocatedRun:
    """A compiled graph whose parameters that stay unsharded between graphs are allocated before it runs.

    Attributes:
        run: The compiled graph.
        positions: Positions of these parameters in the graph's inputs; each item of a list counts.
    """

    run: Callable[..., Any]
    positions: Sequence[int]

    def __call__(self, *args: Any) -> Any:
        for group in owners_of(args, self.positions):
            group.allocate()
        return self.run(*args)


def allocate_kept(
    compiled: Callable[..., Any], inputs: GraphInputs, reports: Sequence[GraphReport]
) -> Callable[..., Any]:
    """Let a compiled graph find the parameters allocated whose windows it has kept.

    Raises:
        UnsupportedFeatureError: a kept window has to be freed within the graph.
    """
    kept = [(fqn, reason) for report in reports for fqn, reason in report.kept]
    if freed := [f"{fqn}: {reason}" for fqn, reason in kept if reason not in _BETWEEN_GRAPHS]:
        raise UnsupportedFeatureError(
            f"expected no parameters that a CUDA graph would have to allocate and free, got {list_names(freed)}; "
            "compile without CUDA graphs, or change how the model reads these parameters"
        )
    return AllocatedRun(compiled, inputs.positions_of({fqn for fqn, _ in kept})) if kept else compiled


def check_device(device: torch.device) -> None:
    """Refuse CUDA graphs on a device that has none."""
    if not has_device_graphs(device):
        raise UnknownOptionError(
            f"expected a GPU to capture CUDA graphs on, got {device}; leave out the mode or option that asks for them "
            '(reduce-overhead, max-autotune, triton.cudagraphs), or use mode="max-autotune-no-cudagraphs"'
        )
