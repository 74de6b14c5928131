"""How many gradients complete a parameter group in the compiled backward that runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from compile_fsdp.runtime.tracing import at_run_time, guarded_text


class GradientCount:
    """Counts the gradients of one group.

    Attributes:
        expected_text: How many gradients the compiled graph that runs now has for the group. See [Note: Numbers that
            stay numbers].
        pending: How many of them are still to come; None outside of it, and until the first thing of the group happens.
        cut_forward: Which forward, of those that were cut into several graphs, a backward goes through at present.
        seen: Unsharded parameters, by id, whose gradients in it have come or are about to.
    """

    def __init__(self) -> None:
        self.expected_text = guarded_text(0)
        self.pending: int | None = None
        self.cut_forward: object = None
        self.seen: set[int] = set()

    @at_run_time
    def expect(
        self,
        read: Sequence[torch.Tensor],
        required: Sequence[torch.Tensor],
        cut_forward: object,
        without: Collection[int],
    ) -> None:
        """Settle what completes the group in the compiled backward that runs next.

        Args:
            read: The unsharded parameters that its forward graph computes with.
            required: Unsharded parameters that must have a gradient, from this graph or another one of the forward,
                before the group is complete; empty if the gradients of this graph are enough.
            cut_forward: None if that graph holds the whole forward of the group's module. Else which forward it is a
                piece of.
            without: Of those in `read`, by id, the ones that get no gradient.
        """
        read = [leaf for leaf in read if id(leaf) not in without]
        expected = len([leaf for leaf in read if leaf.requires_grad])
        if required:
            if cut_forward is not self.cut_forward:
                self.cut_forward, self.seen = cut_forward, set()
            self.seen.difference_update(without)
            self.seen.update(map(id, read))
            if any(leaf.requires_grad and id(leaf) not in self.seen for leaf in required):
                expected += 1  # which never comes
        self.expected_text, self.pending = guarded_text(expected), None

    def start(self) -> None:
        """At the first thing of the group that happens in this backward, which may have begun in another graph."""
        if self.pending is None:
            self.pending = int(self.expected_text)

    def arrive(self) -> bool:
        """Count a gradient; whether the group is complete with it."""
        self.start()
        assert self.pending is not None
        self.pending -= 1
        return self.pending <= 0
