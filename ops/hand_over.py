"""`compile_fsdp::hand_over`: give reduced gradients to their owner during the backward graph.

Hooks on sharded parameters, for example of an optimizer in backward, run inside this op in eager mode, because
`torch.optim.Optimizer.step` deliberately breaks every graph that traces it.

[Note: The owner's ticket]
A graph may hold no Python object, and one graph may serve several owners. So a ticket names the owner: a tensor that is
an input of the graph, whose value survives the copies that functionalization makes. The schema declares a write of the
ticket, which keeps the op in the graph.
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
    """Owner of gradients."""

    def receive(self, reduced: Sequence[Tensor], params: Sequence[int]) -> None:
        """Take the gradients of the parameters at the positions `params`: 1-D tensors that nothing else holds."""


_receivers: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
_numbers = itertools.count()


def issue_ticket(receiver: Receiver) -> Tensor:
    """Return a ticket for the receiver, (1,) int64 on the CPU, valid as long as the receiver lives."""
    number = next(_numbers)
    _receivers[number] = receiver
    return torch.tensor([number], device="cpu")  # whatever the default device


@torch.library.custom_op("compile_fsdp::hand_over", mutates_args=("ticket",))
def hand_over(reduced: Sequence[Tensor], ticket: Tensor, params: Sequence[int]) -> None:
    """Call `receive` of the ticket's owner; see `Receiver`."""
    _call(reduced, ticket, params)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo also compiles code inside a compiled graph.
def _call(reduced: Sequence[Tensor], ticket: Tensor, params: Sequence[int]) -> None:
    with plain_dispatch():
        # Clones, because the compiled graph may reuse the memory of `reduced`.
        _receivers[int(ticket)].receive([each.clone() for each in reduced], params)
