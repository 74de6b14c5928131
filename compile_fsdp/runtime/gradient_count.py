"""Count of the gradients that complete a parameter group in the running compiled backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from compile_fsdp.runtime.tracing import at_run_time


class GradientCount:
    def __init__(self) -> None:
        self.expected_text = "0"  # gradients of the running graph. See [Note: Numbers that stay numbers]
        self.pending: int | None = None  # still to come; None until the group's first event of a compiled backward
        self.cut_forward: object = None  # identifies the forward, cut into several graphs, whose backward runs
        # Ids of unsharded parameters whose gradients in the backward of `cut_forward` arrived or will arrive.
        self.seen: set[int] = set()
        self._entered: Sequence[torch.Tensor] = ()  # `_read` on entering the graph
        self._read: Sequence[torch.Tensor] = ()
        self._required: Sequence[torch.Tensor] = ()
        self._is_held = False

    @at_run_time
    def expect(
        self, read: Sequence[torch.Tensor], required: Sequence[torch.Tensor], cut_forward: object, is_held: bool = False
    ) -> None:
        """Set which gradients complete the group in the next compiled backward; see `enter_graph`.

        `required` parameters must have a gradient from any graph of the forward; empty if this graph's are enough.
        With `is_held`, the group stays incomplete, and torch's final callback reduces and reshards it.
        """
        self._entered, self._required, self._is_held = read, required, is_held
        if required and cut_forward is not self.cut_forward:
            self.cut_forward, self.seen = cut_forward, set()
        self.expect_again()

    @at_run_time
    def expect_again(self) -> None:
        """Take all calls of `expect_none` since `expect` back."""
        self._read = self._entered
        self.expect_none(())

    @at_run_time
    def expect_none(self, parameters: Collection[int]) -> None:
        """Expect no gradient in this backward for these unsharded parameters, given by id."""
        self._read = [leaf for leaf in self._read if id(leaf) not in parameters]
        expected = len([leaf for leaf in self._read if leaf.requires_grad])
        if self._required:
            self.seen.difference_update(parameters)
            self.seen.update(map(id, self._read))
            missing = any(leaf.requires_grad and id(leaf) not in self.seen for leaf in self._required)
            if missing or self._is_held:
                expected += 1  # never arrives, so the group stays incomplete
        self.expected_text, self.pending = str(expected), None

    def start(self) -> None:
        """Start the count at the group's first hook or gradient; do nothing later."""
        if self.pending is None:
            self.pending = int(self.expected_text)

    def arrive(self) -> bool:
        """Count a gradient; return whether it completes the group."""
        self.start()
        assert self.pending is not None
        self.pending -= 1
        return self.pending <= 0
