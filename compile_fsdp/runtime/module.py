"""Class of sharded modules, which compiles a module's own hooks together with its forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn

from compile_fsdp.runtime import calls, trace_record
from compile_fsdp.runtime.attached import find_hooks, hooks_of
from compile_fsdp.runtime.checks import describe, explain_sharded_read
from compile_fsdp.runtime.hooks import StateHooks, settle_hook_order, with_own_code
from compile_fsdp.runtime.pause import pause_collection
from compile_fsdp.runtime.reset import reset_iter_state
from compile_fsdp.runtime.root import Replay, Root
from compile_fsdp.runtime.tracing import at_run_time, inline_only, restore_hook_bodies_now
from compile_fsdp.torch_compat.dynamo import TorchRuntimeError, Unsupported, compiles_frames
from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups
from compile_fsdp.torch_compat.global_state import is_forced_eager


class TraceableModule:
    """Mixin, first in the MRO of a sharded module. See [Note: Where the root is traced]."""

    # torch's FSDPModule.__new__ finds the user's class at this index of the MRO:
    # traceable class, TraceableModule, torch's FSDP class, FSDPModule, the user's class
    _orig_cls_mro_index = 4

    @inline_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        is_outermost = calls.outermost() is None
        is_paused = is_outermost and _prepare_call(self)
        if self._compiled_call_impl is not None:  # type: ignore[attr-defined]
            _complete_unshard(self, is_outermost)
        call = calls.begin(self, args, kwargs)  # type: ignore[arg-type]
        replay = _replay_of(self) if is_outermost else None
        try:
            if replay is None:
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            else:
                output = replay.call(self, args, kwargs, super().__call__)  # type: ignore[misc, arg-type]
        except (Unsupported, TorchRuntimeError) as error:
            _name_module(error)
            raise
        finally:
            calls.end()
            _end_trace(is_paused)
        if is_outermost:
            _root_of(self).drop_prefetched()
        if call.on_output is not None:
            call.on_output(output)
        return output

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    @at_run_time
    def compile(self, *args: Any, **kwargs: Any) -> None:
        _take_own_code(self)
        root = _root_of(self)
        root.was_called, root.replay = False, None
        if kwargs.get("backend") == "compile_fsdp" and _start_replay is not None:
            root.replay, kwargs = _start_replay(kwargs)
        super().compile(*args, **kwargs)  # type: ignore[misc]

    @at_run_time
    def reset_iter_state(self) -> None:
        """Reset torch's state of the root after an exception, and free what a graph left unsharded."""
        state = fsdp_state(self)  # type: ignore[arg-type]
        assert state is not None
        reset_iter_state(state)
        hooks_of(state).root.reset()


@at_run_time
def _replay_of(module: Any) -> Replay | None:
    """Return the object that replays the model's steps; None if the model has none or it must not run.

    It must not run if Dynamo would compile its frames, or under the stance "force_eager".
    """
    is_compiled = module._compiled_call_impl is not None and not compiles_frames() and not is_forced_eager()
    return _root_of(module).replay if is_compiled else None


# Returns the object that replays a compiled model's steps, and the torch.compile arguments to trace it. Set from
# outside, because the runtime does not depend on replay.
_start_replay: Callable[[dict[str, Any]], tuple[Replay | None, dict[str, Any]]] | None = None


def replay_by(start: Callable[[dict[str, Any]], tuple[Replay | None, dict[str, Any]]]) -> None:
    """Let `start` choose how models that are compiled from now on replay their steps."""
    global _start_replay
    _start_replay = start


@inline_only
def _root_of(module: Any) -> Root:
    state = fsdp_state(module)
    assert state is not None
    return hooks_of(state).root


@at_run_time
def _prepare_call(module: Any) -> bool:
    """Prepare the objects that a trace reads, before the outermost call.

    Returns:
        Whether this call paused garbage collection. Only the first call does, because it compiles.
    """
    _take_own_code(module)
    root = _root_of(module)
    root.follow_trainable()
    is_first, root.was_called = not root.was_called, True
    if is_first:
        settle_hook_order(module)
    return is_first and pause_collection()


@at_run_time
def _complete_unshard(module: Any, is_outermost: bool) -> None:
    """Wait for the user's unshard(async_op=True), because a graph cannot."""
    state = fsdp_state(module)
    assert state is not None
    states = [state]
    if is_outermost and state._is_root is None:  # torch does not know the states below yet
        states = [each for each in map(fsdp_state, module.modules()) if each is not None]
    elif is_outermost:
        states = state._state_ctx.all_states
    for fsdp_group in chain.from_iterable(map(param_groups, states)):
        if fsdp_group._all_gather_result is not None:
            fsdp_group.wait_for_unshard()


@at_run_time
def _end_trace(is_paused: bool) -> None:
    if is_paused:
        gc.enable()
    restore_hook_bodies_now()  # in case a trace stopped before it restored them


@at_run_time
def _take_own_code(module: Any) -> None:
    # See [Note: Code of its own for every module]. Only for a root, because graphs would call the parts of a submodule
    # `self._call_impl` and not by their names.
    if "_call_impl" not in module.__dict__:
        module.__dict__["_call_impl"] = MethodType(with_own_code(TraceableModule._call_impl), module)


@at_run_time
def _name_module(error: Exception) -> None:
    """Add the sharded module to Dynamo's error, and the remedy if it read a sharded parameter."""
    hooks = trace_record.abandon()
    if hooks is not None and error.args:
        where = describe(hooks.module, hooks.state)
        remedy = explain_sharded_read(where) if "mixed torch.Tensor and DTensor" in str(error) else ""
        error.args = (f"while compiling {where}:\n{remedy}{error.args[0]}", *error.args[1:])


# All live traceable modules, to recognize parameters of sharded models in graphs.
_installed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@at_run_time
def belongs_to_traceable(parameter: nn.Parameter) -> bool:
    """Return whether a traceable module holds the parameter, managed by FSDP2 or ignored."""
    return any(parameter is own for module in _installed for own in module.parameters())


@cache
def _traceable_class(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (TraceableModule, cls), {"__module__": cls.__module__})


@at_run_time
def is_traceable(module: nn.Module) -> bool:
    return isinstance(module, TraceableModule)


@at_run_time
def install(module: nn.Module) -> None:
    """Make a module that `fully_shard` sharded traceable; its eager runs do not change."""
    state = fsdp_state(module)
    assert state is not None
    hooks = find_hooks(state) or StateHooks(state)
    next(member for member in hooks.members if member.module is module).install()
    cls: Any = type(module)
    module.__class__ = _traceable_class(cls)
    _installed.add(module)
