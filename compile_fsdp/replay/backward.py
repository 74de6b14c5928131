"""Replay the backward of a graph without compiled autograd.

Compiled autograd walks through the autograd graph in every backward, to pass its tensors to the compiled code. After a
replayed forward, it would find them in known places: saved by the forward's single node, incoming gradients, and
parameters. The place of each input is recorded when the backward is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from compile_fsdp.errors import NotPortableError
from compile_fsdp.replay.frames import Frame, FrameRecord
from compile_fsdp.runtime.backward import expect_gradients_again, expect_no_gradient, gradient_accumulated
from compile_fsdp.torch_compat.autograd import drop_saved_tensors, is_compiled_node, keeps_graph
from compile_fsdp.torch_compat.dynamo import GuardFact

# Name of a list of the forward's tensors, and an index in it.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BackwardSignature:
    """The inputs of a backward, and the gradients that it computes."""

    places: tuple[Place, ...]  # of its inputs
    outputs: tuple[int, ...]  # numbers of the outputs of the forward's node that have a gradient
    accumulated: tuple[bool, ...]  # by leaf of the forward's autograd graph: whether it has a gradient before
    undefined: tuple[Place, ...]  # of the leaves that get no gradient
    shared: tuple[int, ...]  # by gradient: position of the first that is the same tensor, which is one input


class Tensors:
    """Tensors of a forward that its backward reads, by place."""

    def __init__(
        self, leaves: Sequence[torch.Tensor], outputs: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
    ) -> None:
        """Take the unsharded parameters, the autograd edges of outputs with a gradient, and the gradients."""
        node: Any = outputs[0].node
        self.node = node
        # Compiled autograd accumulates into the present gradient of a leaf, and traces a separate graph for it.
        self.accumulated = tuple(leaf.grad is not None for leaf in leaves)
        numbers = [id(each) for each in grads]
        self.shared = tuple(map(numbers.index, numbers))
        # Compiled autograd traces a separate graph for such hooks.
        self.has_hooks = any(leaf._backward_hooks for leaf in leaves)
        self._lists: dict[str, Sequence[torch.Tensor | None]] = {
            "gradient": grads,
            "saved": node.saved_tensors,
            "leaf": leaves,
            "accumulated": [leaf.grad for leaf in leaves],
        }

    def find(self, tensor: torch.Tensor) -> Place:
        """Return the place of a tensor.

        Raises:
            NotPortableError: it is in no list, it is a gradient and in another list, or its memory is in several lists.
        """
        every = [((name, i), each) for name, tensors in self._lists.items() for i, each in enumerate(tensors)]
        places = [place for place, each in every if each is tensor]
        if len({name == "gradient" for name, _ in places}) > 1:
            raise NotPortableError("its backward reads a gradient that is also another input")
        if not places and tensor.untyped_storage().nbytes():
            # A saved tensor that is also an output is a new object on each access.
            memory = _memory(tensor)
            places = [place for place, each in every if each is not None and _memory(each) == memory]
            if len({name for name, _ in places}) > 1:
                raise NotPortableError("its backward reads memory that the forward has saved and that is a gradient")
        if not places:
            raise NotPortableError("its backward reads a tensor that is neither saved, nor a gradient, nor a parameter")
        return places[0]

    def get(self, place: Place) -> torch.Tensor:
        name, position = place
        tensor = self._lists[name][position]
        assert tensor is not None
        return tensor


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _is_one_node(outputs: Sequence[GradientEdge]) -> bool:
    """Return whether the outputs come from one autograd node, a compiled graph's."""
    return len({output.node for output in outputs}) == 1 and is_compiled_node(outputs[0].node)


@dataclass(eq=False)
class BackwardFrame:
    """A traced backward, ready to be replayed, as a `KnownBackward`."""

    # A function of the captured graph, inputs, sizes, scalars, hooks, packed data and the object with forward hooks.
    frame: Frame
    signature: BackwardSignature
    _hooks: Any = None

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        outputs: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor],
        hooks: Any,
    ) -> bool:
        signature = self.signature
        if not _is_one_node(outputs) or keeps_graph() or torch.is_anomaly_enabled():
            return False
        if tuple(output.output_nr for output in outputs) != signature.outputs:
            return False
        tensors = Tensors(parameters, outputs, grads)
        if tensors.has_hooks or (tensors.accumulated, tensors.shared) != (signature.accumulated, signature.shared):
            return False
        undefined = [tensors.get(place) for place in signature.undefined]
        expect_no_gradient(undefined)  # before the check, because it compares the number of expected gradients
        # Check an earlier forward's object with equal hooks, because each forward has a new one.
        known = self._hooks if self._hooks is not None and _describe(self._hooks) == _describe(hooks) else hooks
        if not self.frame.fits({"inputs": _not_saved(signature.places, tensors), "state": known}):
            expect_gradients_again(undefined)
            return False
        self._hooks = known
        inputs = [tensors.get(place) for place in signature.places]
        drop_saved_tensors(tensors.node)
        del tensors  # the graph frees tensors that it takes from the list
        self.frame.runs += 1
        self.frame.run(None, inputs, [], [], [], (), hooks)
        return True


class BackwardRecord:
    """Records the first backward of a graph, as its `BackwardObserver`."""

    def __init__(self, finish: Callable[[BackwardRecord], None]) -> None:
        """Take a function that is called when the backward is over."""
        self._finish = finish

    def begin_backward(
        self, parameters: Sequence[torch.Tensor], outputs: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
    ) -> None:
        """Begin a new record, because an earlier backward may have failed."""
        self.frame: FrameRecord | None = None  # until it is traced
        self.signature: BackwardSignature | None = None  # until it is traced
        self.problem: str | None = None  # why the backward cannot be replayed; None if it can
        self._outputs = tuple(output.output_nr for output in outputs)
        self._tensors = Tensors(parameters, outputs, grads) if _is_one_node(outputs) else None
        if self._tensors is None:
            self.problem = "its outputs are not the outputs of its graph"

    def begin_frame(
        self, function: FunctionType, arguments: Sequence[Any], undefined: Sequence[int]
    ) -> FrameRecord | None:
        """Return the record of the frame; None if it cannot be replayed."""
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            return None
        inputs, sizes, scalars, hooks, *_, state = arguments
        try:
            places = tuple(tensors.find(tensor) for tensor in inputs)
        except NotPortableError as error:
            self.problem = str(error)
            return None
        self.signature = BackwardSignature(
            places, self._outputs, tensors.accumulated, tuple(places[i] for i in undefined), tensors.shared
        )
        if len(sizes) or len(scalars) or not all(_is_own(hook, tensors.node) for hook in hooks):
            self.problem = "its backward depends on symbolic sizes, on numbers, or on unknown hooks"
            return None
        gradients = {f"L['inputs'][{i}]" for i, (name, _) in enumerate(places) if name == "gradient"}
        scope = {"L": {"inputs": _not_saved(places, tensors), "state": state}, "G": function.__globals__}
        self.frame = FrameRecord(function.__code__, scope, partial(_follows, gradients))
        return self.frame

    def end_backward(self) -> None:
        self._finish(self)


def _describe(hooks: Any) -> dict[str, object]:
    """Describe the hooks of Dynamo's object by their functions and the objects that these are bound to."""
    return {name: _parts(hook) for name, hook in vars(hooks).items()}


def _parts(hook: Any) -> object:
    if not isinstance(hook, partial):
        return hook  # methods of one object are equal
    return hook.func, [*map(id, hook.args)], {name: id(value) for name, value in hook.keywords.items()}


def _not_saved(places: Sequence[Place], tensors: Tensors) -> dict[int, torch.Tensor]:
    return {i: tensors.get(place) for i, place in enumerate(places) if place[0] != "saved"}


def _is_own(hook: Any, node: Any) -> bool:
    """Return whether every replay has this hook of compiled autograd's list."""
    return hook.func is gradient_accumulated if isinstance(hook, partial) else hook is node


def _follows(gradients: Collection[str], fact: GuardFact) -> bool:
    """Return whether every replay satisfies a guard by construction.

    A replay may fail guards on the gradients, which are given by name, on the modules, and on attributes of inputs,
    such as the gradient of an earlier backward.
    """
    if fact.kind == "DUPLICATE_INPUT" and not all("L['state']" in name for name in (fact.name, fact.argument.name)):
        return True
    if fact.name.startswith("G['"):
        return not fact.name.startswith("G['__")  # functions that the captured graph calls: torch's, and our own
    if "L['inputs'][" in fact.name:
        return fact.name.endswith("]") and fact.name not in gradients
    return "L['" in fact.name and "L['state']" not in fact.name
