"""What the modules of one parameter group hold: which parameters they see, and what is put back after a forward.

[Note: Parts of a group do not know it]
`ModuleParams` and `GroupBackward` are parts of a `TraceableGroup`, and their methods get the group as an argument. With
a reference to it, or to what it has, of their own, Dynamo would guard before each step that both are the same object.
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
    """The parameters that the modules of one group hold. See [Note: Parts of a group do not know it].

    Attributes:
        is_tied: Whether several modules hold one of the parameters.
        hold: Which parameters the modules hold now.
        saved: By parameter, what its module held before this forward, which puts it back; empty at other times.
    """

    def __init__(self, params: Sequence[TraceableParam]) -> None:
        self.is_tied = any(param.fsdp_param._module_info.shared_modules for param in params)
        self.hold = KNOWN.by_state
        self.saved: Sequence[nn.Parameter | None] = ()

    def save(self, group: TraceableGroup) -> None:
        """Before a forward that ends sharded: remember what the modules hold, if it is what they are to hold after it.

        For Dynamo a dict that gets back what it had has not changed. It neither writes it after each step, nor makes
        the sharded parameters inputs of the graph, nor guards them. Here, not in the parameters, since Dynamo takes a
        millisecond for each function that it goes into.
        """
        fsdp_group = group.fsdp_group
        ends_sharded = fsdp_group.post_forward_mesh_info is fsdp_group.mesh_info
        is_post_forward = fsdp_group._sharded_state is group.known.post_forward
        if ends_sharded and not self.is_tied and not is_post_forward and _is_below_a_call():
            infos = [param.fsdp_param._module_info for param in group.params]
            self.saved = [info.module._parameters[info.param_name] for info in infos]
            self.hold = group.known.until_restored

    def restore(self, group: TraceableGroup) -> None:
        """After a forward that ends sharded: put back what was saved, or else register the sharded parameters."""
        if self.hold is not group.known.until_restored:
            self.register_sharded(group)
            return
        for param, value in zip(group.params, self.saved, strict=True):
            info = param.fsdp_param._module_info
            info.module._parameters[info.param_name] = value
        self.saved = ()
        self.hold = group.known.by_state

    def register_unsharded(self, group: TraceableGroup) -> None:
        """Let the modules hold what the graph computes with."""
        if self.hold is not group.known.until_restored:  # else they are back in their state when anything looks
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
        """Let the modules hold what eager code finds after a forward that leaves the group unsharded."""
        for param in group.params:
            param.register_left_unsharded()

    def register_post_forward(self, group: TraceableGroup) -> None:
        """Let the modules hold the parameters over the smaller mesh."""
        self.sync_states(group)
        for param in group.params:
            param.register_post_forward()

    def keep_sharded(self, group: TraceableGroup) -> None:
        """The group is unsharded for a backward in which nothing looks into the modules: they stay as they are."""
        self.hold = group.known.modules_sharded

    def register_resharded(self, group: TraceableGroup) -> None:
        """A backward has sharded the group: let the modules hold the sharded parameters, if they do not already."""
        if self.hold is not group.known.modules_sharded:
            self.register_sharded(group)
        self.hold = group.known.by_state

    def sync_states(self, group: TraceableGroup) -> None:
        """Take the states of the parameters to that of their group.

        They are for code outside of graphs. Dynamo takes milliseconds for each, so a backward that shards again what
        it has unsharded leaves them alone.
        """
        state = group.fsdp_group._sharded_state
        for param in group.params:
            param.fsdp_param.sharded_state = state

    @at_run_time
    def show_unsharded(self, group: TraceableGroup) -> None:
        """Behind a graph that has left the group unsharded: let eager code, and torch's final callback, find it so."""
        if self.hold is group.known.modules_sharded and group.fsdp_group._sharded_state is group.known.unsharded:
            self.register_unsharded(group)

    @at_run_time
    def forget(self) -> None:
        """The step is over, or has failed."""
        self.hold, self.saved = KNOWN.by_state, ()


@eval_at_trace_time
def _is_below_a_call() -> bool:
    """Whether a sharded module is called outside of what is traced: it compares what needs a gradient before each step.

    Otherwise graphs must read the sharded parameters for Dynamo to guard them: whether they need one may change.
    """
    return outermost() is not None
