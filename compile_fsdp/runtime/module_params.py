"""Parameters that the modules of a group hold, in a step and after a forward.

[Note: Parts of a group do not know it]
`ModuleParams` and `GroupBackward` are parts of a `TraceableGroup`, and their methods get the group as an argument. If
they kept a reference to the group or to its attributes, Dynamo would guard before each step that both references lead
to one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from compile_fsdp.runtime.calls import outermost
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.states import KNOWN
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


class ModuleParams:
    """Parameters that the modules of one group hold. See [Note: Parts of a group do not know it].

    Attributes:
        is_tied: Whether several modules share a parameter of the group.
        hold: Which parameters the modules hold now.
        saved: The parameters that the modules held before this forward, until `restore` puts them back; else empty.
    """

    def __init__(self, params: Sequence[TraceableParam]) -> None:
        self.is_tied = any(param.fsdp_param._module_info.shared_modules for param in params)
        self.hold = KNOWN.by_state
        self.saved: Sequence[nn.Parameter | None] = ()

    def save(self, group: TraceableGroup) -> None:
        """Remember the parameters that the modules hold, if they must hold them again after the forward.

        For Dynamo, a dict that gets its old values back is unchanged. Dynamo neither writes it after each step, nor
        makes the sharded parameters graph inputs, nor guards them. This code is not a method of the parameters, because
        Dynamo takes a millisecond to enter each function.
        """
        fsdp_group = group.fsdp_group
        ends_sharded = fsdp_group.post_forward_mesh_info is fsdp_group.mesh_info
        is_post_forward = fsdp_group._sharded_state is group.known.post_forward
        if ends_sharded and not self.is_tied and not is_post_forward and _is_below_a_call():
            infos = [param.fsdp_param._module_info for param in group.params]
            self.saved = [info.module._parameters[info.param_name] for info in infos]
            self.hold = group.known.until_restored

    def restore(self, group: TraceableGroup) -> None:
        """Put the saved parameters back after a forward, or else register the sharded parameters."""
        if self.hold is not group.known.until_restored:
            self.register_sharded(group)
            return
        for param, value in zip(group.params, self.saved, strict=True):
            info = param.fsdp_param._module_info
            info.module._parameters[info.param_name] = value
        self.saved = ()
        self.hold = group.known.by_state

    def register_unsharded(self, group: TraceableGroup) -> None:
        """Let the modules hold the tensors that the graph computes with."""
        if self.hold is not group.known.until_restored:  # else `restore` undoes it before code outside reads the states
            self.sync_states(group)
            self.hold = group.known.by_state
        for param in group.params:
            param.register_unsharded()

    def register_sharded(self, group: TraceableGroup) -> None:
        """Let the modules hold the sharded parameters of a group that is sharded."""
        self.sync_states(group)
        self.hold = group.known.by_state
        for param in group.params:
            param.register_sharded()

    def register_left_unsharded(self, group: TraceableGroup) -> None:
        """Let the modules hold torch's unsharded parameters after a forward that does not reshard."""
        for param in group.params:
            param.register_left_unsharded()

    def register_post_forward(self, group: TraceableGroup) -> None:
        """Let the modules hold the parameters over the smaller mesh."""
        self.sync_states(group)
        for param in group.params:
            param.register_post_forward()

    def keep_sharded(self, group: TraceableGroup) -> None:
        """Leave the sharded parameters in the modules while a backward unshards the group.

        No code reads the modules in such a backward.
        """
        self.hold = group.known.modules_sharded

    def register_resharded(self, group: TraceableGroup) -> None:
        """Let the modules hold the sharded parameters after a backward, if they do not yet."""
        if self.hold is not group.known.modules_sharded:
            self.register_sharded(group)
        self.hold = group.known.by_state

    def sync_states(self, group: TraceableGroup) -> None:
        """Set the parameters' states to the group's state.

        Only code outside of graphs reads them. Dynamo takes milliseconds to write each state, so a backward that
        unshards and reshards a group leaves them alone.
        """
        state = group.fsdp_group._sharded_state
        for param in group.params:
            param.fsdp_param.sharded_state = state

    @at_run_time
    def show_unsharded(self, group: TraceableGroup) -> None:
        """Register the unsharded parameters after a graph that leaves the group unsharded.

        Eager code and torch's final callback read them.
        """
        if self.hold is group.known.modules_sharded and group.fsdp_group._sharded_state is group.known.unsharded:
            self.register_unsharded(group)

    @at_run_time
    def forget(self) -> None:
        """Discard the state of a finished or failed step."""
        self.hold, self.saved = KNOWN.by_state, ()


@eval_at_trace_time
def _is_below_a_call() -> bool:
    """Return whether a sharded module's call runs outside of the trace.

    Such a call copies `requires_grad` to the unsharded parameters before each step. Without it, graphs must read the
    sharded parameters so that Dynamo guards their `requires_grad`, because it may change.
    """
    return outermost() is not None
