"""`compile_fsdp::hand_over`: give reduced gradients to their owner while the backward graph runs.

Hooks on sharded parameters, an optimizer in backward for example, run inside of it, in eager mode:
`torch.optim.Optimizer.step` breaks every graph that it is traced into, by its own decision.

[Note: The owner's ticket]
A graph may hold no Python object, and one graph may serve several owners. An owner is therefore named by a ticket,
a tensor that is an input of the graph: its value survives the copies that functionalization makes. The schema says
that the ticket is written, which keeps the op in the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compile_fsdp.torch_compat.dispatch import plain_dispatch


class Receiver(Protocol):
    """Who gets gradients."""

    def receive(self, reduced: Sequence[Tensor], params: Sequence[int]) -> None:
        """Take `reduced`, 1-D and nobody else's: the gradients of the parameters at these positions."""


_receivers: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
_numbers = itertools.count()


def issue_ticket(receiver: Receiver) -> Tensor:
    """A ticket, (1,) int64 on the CPU, under which `hand_over` finds the receiver for as long as it lives."""
    number = next(_numbers)
    _receivers[number] = receiver
    return torch.tensor([number])


@torch.library.custom_op("compile_fsdp::hand_over", mutates_args=("ticket",))
def hand_over(reduced: Sequence[Tensor], ticket: Tensor, params: Sequence[int]) -> None:
    """Call `receive` of the ticket's owner; see `Receiver`."""
    _call(reduced, ticket, params)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo compiles what runs inside of a compiled graph.
def _call(reduced: Sequence[Tensor], ticket: Tensor, params: Sequence[int]) -> None:
    with plain_dispatch():
        # The compiler may use the memory of `reduced` again.
        _receivers[int(ticket)].receive([each.clone() for each in reduced], params)
