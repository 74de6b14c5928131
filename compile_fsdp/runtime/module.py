"""Class of sharded modules, which compiles a module's own hooks together with its forward.

[Note: Separate code for every module]
Dynamo stops compiling a code object at the recompile limit, 8 by default. If roots shared the code object of
`_call_impl`, Dynamo could not compile the ninth model. Behind a graph break, Dynamo also compiles each module's hooks
as separate frames, so each hook has a separate code object, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain, count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from compile_fsdp.runtime import calls, trace_record
from compile_fsdp.runtime.attached import attach, find_hooks, module_hooks_of
from compile_fsdp.runtime.checks import describe
from compile_fsdp.runtime.hooks import post_forward, pre_forward
from compile_fsdp.runtime.module_params import finds_substitute, put_sharded_back, reshard_eager_slices
from compile_fsdp.runtime.reset import reset_step
from compile_fsdp.runtime.root import ModuleHooks, Replay, Root, StateHooks
from compile_fsdp.runtime.run_compiler import run_compiler
from compile_fsdp.runtime.subclass_parameters import is_extended
from compile_fsdp.runtime.tracing import at_run_time, inline_only, restore_hook_bodies_now
from compile_fsdp.torch_compat.dynamo import TorchRuntimeError, Unsupported, compiles_frames, skip_code
from compile_fsdp.torch_compat.dynamo_limits import traces_rnns
from compile_fsdp.torch_compat.fsdp import FSDPState, await_optimizer, fsdp_state, original_class_index, param_groups
from compile_fsdp.torch_compat.global_state import is_forced_eager, is_in_dual_level

# Returns the object that replays a model's steps, or None, and the arguments for torch.compile, from the user's.
StartReplay = Callable[[dict[str, Any]], tuple[Replay | None, dict[str, Any]]]


class TraceableModule:
    """Mixin, first in the MRO of a sharded module. See [Note: Where the root is traced]."""

    @inline_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        call = _begin(self, args, kwargs)
        try:
            output = _run(call, super().__call__)  # type: ignore[misc]
        finally:
            calls.end()
            restore_hook_bodies_now()  # in case a trace stopped before it restored them
        return _finish(call, output)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    @at_run_time
    def compile(self, *args: Any, **kwargs: Any) -> None:
        _take_own_code(self)
        root = _root_of(self)
        root.was_called, root.replay = False, None
        if kwargs.get("backend") == "compile_fsdp":
            root.replay, kwargs = self._start_replay(kwargs)  # type: ignore[attr-defined]
        super().compile(*args, **kwargs)  # type: ignore[misc]

    @at_run_time
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if (replay := _root_of(self).replay) is not None:
            replay.release()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    @at_run_time
    def reset_iter_state(self) -> None:
        """Reset torch's state of the root after an exception, and free groups that a graph left unsharded."""
        reset_step(_state_of(self))


@at_run_time
def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> calls.ModuleCall:
    """Prepare the objects that a trace reads, and record the start of the call."""
    root, is_first = _root_of(module), False
    if calls.outermost() is None:
        _take_own_code(module)
        root.follow_trainable()
        if not root.was_called:  # the first call compiles
            root.was_called = True
            _settle_hook_order(module)
            is_first = True
    # Dynamo of torch 2.15 fails in the call's frame.
    is_eager = isinstance(module, nn.RNNBase) and not traces_rnns()
    if module._compiled_call_impl is not None:
        if calls.outermost() is None:
            await_optimizer(_state_of(module))
        states = list(_states_of_call(module))
        groups = list(chain.from_iterable(map(param_groups, states)))
        reshard_eager_slices(group for hooks in filter(None, map(find_hooks, states)) for group in hooks.groups)
        for fsdp_group in groups:
            if fsdp_group._all_gather_result is not None:
                fsdp_group.wait_for_unshard()  # the user's unshard(async_op=True), because a graph cannot
        if root.had_substitute:
            put_sharded_back(groups)
        root.had_substitute = finds_substitute(groups)
        is_eager = is_eager or root.had_substitute or is_in_dual_level()
    return calls.begin(module, args, kwargs, is_first, is_eager)


@at_run_time
def _states_of_call(module: nn.Module) -> Iterator[FSDPState]:
    """Return the states of the modules that a graph of this call may hold."""
    state = _state_of(module)
    if calls.outermost() is not None:
        return iter([state])
    # torch does not know the states below before the first forward.
    found = map(fsdp_state, module.modules()) if state._is_root is None else state._state_ctx.all_states
    return filter(None, found)


@at_run_time
def _run(call: calls.ModuleCall, run: Callable[..., Any]) -> Any:
    """Run the forward, by a replay if the model has one, and name the module in Dynamo's errors."""
    module: Any = call.module
    if call.is_eager:
        run = torch.compiler.disable(module._call_impl)
    replay = _root_of(module).replay if call.is_outermost and not call.is_eager else None
    if replay is None or module._compiled_call_impl is None or compiles_frames() or is_forced_eager():
        forward = partial(run, *call.args, **call.kwargs)
    else:
        forward = partial(replay.call, module, call.args, call.kwargs, run)
    try:
        return run_compiler(forward) if call.is_first else forward()
    except (Unsupported, TorchRuntimeError) as error:
        _name_module(error)
        raise


@at_run_time
def _finish(call: calls.ModuleCall, output: Any) -> Any:
    """Drop the gathers that the call did not use, and show the output to the code that follows the call."""
    if call.is_outermost:
        _root_of(call.module).drop_prefetched()
    if call.on_output is not None:
        call.on_output(output)
    return output


@at_run_time
def _state_of(module: Any) -> FSDPState:
    state = fsdp_state(module)
    assert state is not None
    return state


@at_run_time
def _root_of(module: Any) -> Root:
    return module_hooks_of(module).hooks.root


@at_run_time
def _take_own_code(module: Any) -> None:
    # See [Note: Separate code for every module]. Only for a root, because graphs would call the parts of a submodule
    # `self._call_impl` and not by their names.
    if "_call_impl" not in module.__dict__:
        module.__dict__["_call_impl"] = MethodType(_with_own_code(TraceableModule._call_impl), module)


_copies = count()


@at_run_time
def _with_own_code(function: Any) -> Any:
    """Copy a function with its code object. See [Note: Separate code for every module]."""
    # A new name, because Dynamo's tables would not tell equal code objects apart.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    # Copied globals, because Dynamo stores results of our functions there and never removes them.
    return FunctionType(code, dict(function.__globals__), function.__name__, closure=function.__closure__)


@at_run_time
def _name_module(error: Exception) -> None:
    """Add the sharded module to Dynamo's error, and the remedy if it read a sharded parameter."""
    hooks = trace_record.abandon()
    if hooks is not None and error.args:
        where = describe(hooks.state)
        remedy = ""
        if "mixed torch.Tensor and DTensor" in str(error):
            remedy = (
                f"{where} computes with a sharded parameter: FSDP2 gathers a parameter only while the module runs "
                "whose fully_shard() call holds it; read it in that module's forward, or shard both modules with one "
                "call, fully_shard([a, b])\n"
            )
        error.args = (f"while compiling {where}:\n{remedy}{error.args[0]}", *error.args[1:])


# All live traceable modules, to recognize parameters of sharded models in graphs.
_installed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@at_run_time
def belongs_to_traceable(parameter: nn.Parameter) -> bool:
    """Return whether a traceable module holds the parameter, managed by FSDP2 or ignored."""
    return any(parameter is own for module in _installed for own in module.parameters())


@cache
def _traceable_class(cls: type[Any], start_replay: StartReplay) -> type[Any]:
    attributes = {
        "__module__": cls.__module__,
        "_start_replay": staticmethod(start_replay),
        # Where `FSDPModule.__new__` finds the user's class in the MRO: two classes are before those of torch.
        "_orig_cls_mro_index": original_class_index(cls) + 2,
    }
    return type(cls.__name__, (TraceableModule, cls), attributes)


@at_run_time
def install(module: nn.Module, start_replay: StartReplay) -> None:
    """Make a module that `fully_shard` sharded traceable; its eager runs do not change."""
    state = _state_of(module)
    if find_hooks(state) is None:
        attach(StateHooks(state))
    _replace_hooks(module_hooks_of(module))
    cls: Any = type(module)
    module.__class__ = _traceable_class(cls, start_replay)
    _installed.add(module)


@at_run_time
def _replace_hooks(member: ModuleHooks) -> None:
    """Replace torch's hooks in place, to keep their order among the user's hooks."""
    own = _with_own_code(pre_forward), _with_own_code(post_forward)
    member.module._forward_pre_hooks[member.pre_id], member.module._forward_hooks[member.post_id] = own
    if any(is_extended(param) for group in member.hooks.groups for param in group.fsdp_group.fsdp_params):
        # Keep Dynamo from compiling these frames behind a graph break, because a graph that returns a tensor
        # subclass to the modules would get a plain gradient for the subclass.
        for hook in own:
            skip_code(hook.__code__)
    _settle_hook_order(member.module)  # torch moved its hooks to the front, and a caller may be compiled


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile the frames that it calls.
def _settle_hook_order(model: nn.Module) -> None:
    """Reinsert all modules' forward hooks in the order in which they run. (2.11.0)

    Dynamo before 2.12 looks a hook up by its position of registration, which is wrong if `prepend=True` moved the hook.
    """
    if torch.__version__ >= "2.12":
        return
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            in_order = list(hooks.items())
            hooks.clear()
            hooks.update(in_order)
