"""Compare compiled graphs with eager references, for `options={"verify": True}`.

In its first step, each graph runs twice on equal inputs: op by op as Dynamo has traced it, then compiled. Outputs, and
inputs that the graph writes, must be equal within a tolerance. After the first backward, eager FSDP2 repeats the step,
and the gradients must be equal too. If one rank finds a difference, all ranks raise.

Both comparisons issue collectives, so they run only if all ranks have just met: see `agreement.agree`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from compile_fsdp.backend.agreement import share_choice
from compile_fsdp.errors import VerificationError
from compile_fsdp.ops.call_block import op_by_op
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.runtime.calls import ModuleCall
from compile_fsdp.runtime.outputs import find_tensors
from compile_fsdp.torch_compat.autograd import after_backward, preserve_version_counter
from compile_fsdp.torch_compat.dispatch import plain_tensors, tree_map_only
from compile_fsdp.torch_compat.distributed import local_tensor
from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups
from compile_fsdp.torch_compat.global_state import autocast_dtypes

# Largest allowed difference relative to a tensor's largest value, by the coarsest dtype of the computation: some
# hundred times the dtype's rounding error. A missed gather or a lost summand causes an error as large as the values.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_COARSEST = 5e-1  # dtypes of 8 bits and less


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the tolerance for these dtypes; 0 if none is floating."""
    return max((TOLERANCES.get(each, _COARSEST) for each in dtypes if each.is_floating_point), default=0.0)


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Describe how a tensor differs from its expected value; "" if equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"is {got.dtype} of shape {tuple(got.shape)}, not {expected.dtype} of shape {tuple(expected.shape)}"
    if not (got.is_floating_point() or got.is_complex()):
        return "" if torch.equal(got, expected) else "has different values"
    wide = torch.complex128 if got.is_complex() else torch.float64
    got, expected = got.detach().to(wide), expected.detach().to(wide)
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return "is not finite at different places"
    got, expected = got.masked_fill(~got.isfinite(), 0), expected.masked_fill(~expected.isfinite(), 0)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    error = (got - expected).abs().max().item() if expected.numel() else 0.0
    # A tensor that is zero except for rounding errors may differ by their full size.
    if error <= tolerance * max(largest, tolerance):
        return ""
    return f"differs by {error:.3g} from values of up to {largest:.3g}; allowed is {tolerance:g} of these"


class _Random:
    """Saved random number states of the CPU and the tensors' devices."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        self._cpu = torch.get_rng_state()
        self._states = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the saved states inside, and the present states again on exit."""
        device_type = next((device.type for device in self._states), "cpu")
        with torch.random.fork_rng([*self._states], device_type=device_type):
            torch.set_rng_state(self._cpu)
            for device, state in self._states.items():
                torch.get_device_module(device).set_rng_state(state, device)
            yield


def is_repeatable(graph: fx.Graph) -> bool:
    """Return whether a graph may run twice: it hands no gradients to hooks, such as an optimizer's."""
    return not any(node.target is torch.ops.compile_fsdp.hand_over.default for node in graph.nodes)


@dataclass(eq=False)
class VerifiedGraph:
    """A compiled graph whose first run is compared with the traced graph."""

    compiled: Callable[..., Any]
    traced: fx.GraphModule | None  # Dynamo's graph that `compiled` was compiled from; None after the first run
    what: str  # the graph's name in errors
    collectives: CollectiveSequence
    limit_s: float  # seconds to wait for the results of the peers

    def __call__(self, *args: Any) -> Any:
        traced, self.traced = self.traced, None
        if traced is None:
            return self.compiled(*args)
        inputs = list(plain_tensors(args))
        before = [_Contents(tensor) for tensor in inputs]
        with preserve_version_counter(tuple(inputs)), _Random(inputs).restored(), op_by_op():
            # Pass copies of lists, because a run may empty them.
            results = traced(*(list(each) if isinstance(each, list) else each for each in args))
            expected = [tensor.detach().clone() for tensor in plain_tensors(results)]
            after = [_Contents(tensor) for tensor in inputs]
            for contents in before:
                contents.restore()
        outputs = self.compiled(*args)
        problem = _find_problem(traced, list(plain_tensors(outputs)), expected, inputs, after)
        problem = share_choice(self.collectives.groups, self.what, problem or "=", self.limit_s)
        if problem:
            raise VerificationError(
                f"expected the compiled {self.what} to equal the traced graph, but {problem}; find the pass at fault "
                "with the option disabled_passes, or leave the compiler out with inner_backend='aot_eager', and report "
                "it"
            )
        return outputs


def _find_problem(
    traced: fx.GraphModule,
    outputs: list[torch.Tensor],
    expected: list[torch.Tensor],
    inputs: list[torch.Tensor],
    after: list[_Contents],
) -> str:
    dtypes = {tensor.dtype for node in traced.graph.nodes if (tensor := find_fake_tensor(node)) is not None}
    tolerance = tolerance_of(dtypes)
    if len(outputs) != len(expected):
        return f"it has {len(outputs)} outputs in place of {len(expected)}"
    for i, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if problem := difference(got, wanted, tolerance):
            return f"output {i} {problem}"
    for i, (tensor, contents) in enumerate(zip(inputs, after, strict=True)):
        if problem := difference(_Contents(tensor).tensor, contents.tensor, tolerance):
            return f"after the run input {i} {problem}"
    return ""


class _Contents:
    """Copy of the present contents of a tensor's storage, and in `tensor` of the tensor, empty if it is freed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._copy = self._storage.clone()
        self.tensor = tensor.new_empty(0) if self._storage.nbytes() == 0 else tensor.detach().clone()

    def restore(self) -> None:
        self._storage.resize_(self._copy.nbytes())
        self._storage.copy_(self._copy)


class VerifiedStep:
    """One call of a model, before any of its forward has run; eager FSDP2 repeats its step.

    `collectives` are those of its forward graph; `limit_s` are seconds to wait for the results of the peers.
    """

    def __init__(self, call: ModuleCall, collectives: CollectiveSequence, limit_s: float) -> None:
        self._module = call.module
        self._collectives = collectives
        self._limit_s = limit_s
        self._inputs = tree_map_only(torch.Tensor, _copy, (call.args, call.kwargs))
        self._buffers = _copy_buffers(call.module)
        self._grads = {name: _copy(parameter.grad) for name, parameter in call.module.named_parameters()}
        self._random = _Random(call.module.parameters())
        self._dtypes = autocast_dtypes().values()
        self._output_grads: dict[int, torch.Tensor] = {}
        call.on_output = self._watch

    def _watch(self, output: Any) -> None:
        for i, tensor in enumerate(_differentiable(output)):
            tensor.register_hook(partial(self._keep, i))

    def _keep(self, position: int, grad: torch.Tensor | None) -> None:
        if grad is None:  # an output that the loss does not read, such as logits beside a loss
            return
        if not self._output_grads:
            after_backward(lambda: after_backward(self._compare))  # after FSDP2's own final callback
        self._output_grads[position] = grad.detach().clone()

    def _compare(self) -> None:
        grads, self._output_grads = self._output_grads, {}
        if not grads or not _leaves_gradients(self._module):
            return
        named = dict(self._module.named_parameters())
        ours = {name: parameter.grad for name, parameter in named.items()}
        buffers = _copy_buffers(self._module)
        try:
            for name, parameter in named.items():
                parameter.grad = _copy(self._grads[name])
            _restore_buffers(self._module, self._buffers)
            with self._random.restored(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                args, kwargs = self._inputs
                outputs = _differentiable(self._module(*args, **kwargs))
                torch.autograd.backward([outputs[i] for i in grads], list(grads.values()))
            problem = self._find_problem(named, ours)
        finally:
            for name, parameter in named.items():
                parameter.grad = ours[name]
            _restore_buffers(self._module, buffers)
        problem = share_choice(self._collectives.groups, "backward graph", problem or "=", self._limit_s)
        if problem:
            raise VerificationError(
                f"expected the gradients of torch's eager FSDP2, but {problem}; the gradients of this step are those "
                "of the compiled model; train eagerly, and report it"
            )

    def _find_problem(self, named: dict[str, nn.Parameter], ours: dict[str, torch.Tensor | None]) -> str:
        dtypes = {*self._dtypes, *(parameter.dtype for parameter in named.values())}
        for group in _groups(self._module):
            for policy in (param.mp_policy for param in group.fsdp_params):
                dtypes.update(each for each in (policy.param_dtype, policy.reduce_dtype) if each)
        tolerance = tolerance_of(dtypes)
        for name, parameter in named.items():
            got, expected = ours[name], parameter.grad
            if (got is None) != (expected is None):
                return f"{name} has {'no gradient' if got is None else 'a gradient, but none in eager FSDP2'}"
            if got is None or expected is None:
                continue
            if problem := difference(local_tensor(got), local_tensor(expected), tolerance):
                return f"the gradient of {name} {problem}"
        return ""


def _leaves_gradients(module: nn.Module) -> bool:
    """Return whether a backward ends with all gradients in `.grad`: no hook consumes them, and all groups reduce."""
    hooked = any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    return not hooked and all(group.reduce_grads for group in _groups(module))


def _groups(module: nn.Module) -> list[Any]:
    states = (fsdp_state(each) for each in module.modules())
    return [group for state in states if state is not None for group in param_groups(state)]


def _differentiable(output: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    find_tensors(output, tensors, [])
    return [tensor for tensor in tensors if tensor.requires_grad]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _restore_buffers(module: nn.Module, copies: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(copies[name])
