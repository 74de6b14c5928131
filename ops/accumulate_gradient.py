"""Gradient accumulation of a captured backward, under a name that is the same in every process.

Compiled autograd binds its functions when it first meets them, to names that cannot be imported; a graph that calls
one is never cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile_fsdp.torch_compat.autograd import compiled_autograd_function


def accumulate_gradient(
    grads: Sequence[Tensor], leaf: Tensor, earlier: Tensor | None, has_post_hooks: bool
) -> Sequence[Tensor | None]:
    """What `leaf.grad`, now `earlier`, becomes when `grads[0]` arrives, as the one item of a sequence."""
    accumulated: Sequence[Tensor | None] = compiled_autograd_function("AccumulateGrad")(
        grads, leaf, earlier, has_post_hooks
    )
    return accumulated
