"""Gradient accumulation of a captured backward under an importable name.

Compiled autograd binds its functions to names that cannot be imported, and a graph that calls such a name is never
cached. This module's name is equal in every process.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile_fsdp.torch_compat.autograd import compiled_autograd_function


def accumulate_gradient(
    grads: Sequence[Tensor], leaf: Tensor, earlier: Tensor | None, has_post_hooks: bool, is_only_copied: bool = False
) -> Sequence[Tensor | None]:
    """Return, as the only item, the value of `leaf.grad` after `grads[0]` is added to `earlier`.

    If `is_only_copied`, the graph only copies this value, for a reduction. Then it may be the gradient itself.
    """
    grad = grads[0]
    if is_only_copied and earlier is None and (grad.stride(), grad.dtype) == (leaf.stride(), leaf.dtype):
        return grads
    accumulate = compiled_autograd_function("AccumulateGrad")
    accumulated: Sequence[Tensor | None] = accumulate(grads, leaf, earlier, has_post_hooks)
    return accumulated
