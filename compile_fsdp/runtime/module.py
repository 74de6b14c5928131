"""The class that a sharded module gets, so that its own hooks are compiled together with its forward."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from compile_fsdp.compat import (
    Unsupported,
    fsdp_state,
    reset_iter_state,
    restore_hook_bodies_now,
    skip_code,
)
from compile_fsdp.pause import pause_collection
from compile_fsdp.runtime import calls, scope
from compile_fsdp.runtime.checks import describe
from compile_fsdp.runtime.hooks import StateHooks, with_own_code


class TraceableModule:
    """Mixin, first in the MRO of a sharded module. See [Note: Where the root is traced]."""

    # torch's FSDPModule.__new__ finds the user's class at this index of the MRO:
    # traceable class, TraceableModule, torch's FSDP class, FSDPModule, the user's class
    _orig_cls_mro_index = 4

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        is_paused = False
        if calls.outermost() is None:
            self._take_own_code()
            hooks: StateHooks = fsdp_state(self)._compile_fsdp_hooks  # type: ignore[arg-type,union-attr]
            hooks.follow_trainable()
            # The call that compiles, if one does.
            is_paused, hooks.was_called = not hooks.was_called and pause_collection(), True
        call = calls.begin(self, args, kwargs)  # type: ignore[arg-type]
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Unsupported as error:
            _name_module(error)
            raise
        finally:
            if is_paused:
                gc.enable()
            calls.end()
            restore_hook_bodies_now()  # where a trace has stopped before it did so itself
        if calls.outermost() is None:
            fsdp_state(self)._compile_fsdp_hooks.drop_prefetched()  # type: ignore[arg-type,union-attr]
        if call.on_output is not None:
            call.on_output(output)
        return output

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._take_own_code()
        fsdp_state(self)._compile_fsdp_hooks.was_called = False  # type: ignore[arg-type,union-attr]
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def _take_own_code(self) -> None:
        # See [Note: Code of its own for every module]; of a root alone, or its parts would be called `self._call_impl`
        # in graphs, and not by their names.
        if "_call_impl" not in self.__dict__:
            self.__dict__["_call_impl"] = MethodType(with_own_code(TraceableModule._call_impl), self)

    def reset_iter_state(self) -> None:
        """torch's own, for the root after an exception; also frees what a compiled graph has left unsharded."""
        state = fsdp_state(self)  # type: ignore[arg-type]
        assert state is not None
        reset_iter_state(state)
        for each in state._state_ctx.all_states:
            each._compile_fsdp_hooks.reset()


# No frames to compile on their own: `_call_impl` below them is.
for _function in (
    TraceableModule.__call__,
    TraceableModule._take_own_code,
    pause_collection,
    with_own_code,
    calls.outermost,
    calls.Call.__init__,
    calls.begin,
    calls.end,
):
    skip_code(_function.__code__)


def _name_module(error: Unsupported) -> None:
    """Say in Dynamo's own error in which sharded module it stopped."""
    hooks = scope.abandon()
    if hooks is not None and error.args:
        where = describe(hooks.module, hooks.state)
        error.args = (f"while compiling {where}:\n{error.args[0]}", *error.args[1:])


# Every traceable module that is alive, to tell whose parameters a graph reads.
_installed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def belongs_to_traceable(parameter: nn.Parameter) -> bool:
    """Whether some traceable model holds the parameter, managed by FSDP2 or ignored."""
    return any(parameter is own for module in _installed for own in module.parameters())


@cache
def _traceable_class(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (TraceableModule, cls), {"__module__": cls.__module__})


def is_traceable(module: nn.Module) -> bool:
    return isinstance(module, TraceableModule)


def install(module: nn.Module) -> None:
    """Make one module that `fully_shard` was applied to traceable; nothing changes for its eager runs."""
    state = fsdp_state(module)
    assert state is not None
    hooks = getattr(state, "_compile_fsdp_hooks", None) or StateHooks(state)
    next(member for member in hooks.members if member.module is module).install()
    cls: Any = type(module)
    module.__class__ = _traceable_class(cls)
    _installed.add(module)
