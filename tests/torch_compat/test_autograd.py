"""What a running backward still does."""

from __future__ import annotations

from typing import Any

import torch

from compile_fsdp.torch_compat.autograd import accumulates_into


class _Freed(torch.Tensor):
    """Stands for a tensor subclass that computes from its parts on every op, while the parts are freed."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"expected no op, got {op}")


def test_no_op_reads_a_leaf_that_may_get_a_gradient() -> None:
    leaf, freed, found = torch.ones(4, requires_grad=True), _Freed(), []
    result = leaf * 2
    result.register_hook(lambda grad: found.extend(map(accumulates_into, (leaf, freed))))
    result.sum().backward()
    assert found == [True, False]
