"""torch's dispatcher and a running backward, as this package reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_fsdp.torch_compat.autograd import accumulates_into
from compile_fsdp.torch_compat.dispatch import read_argument


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


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((0.5,), {}, 0.5), ((), {"dropout_p": 0.5}, 0.5), ((), {}, 0.0)],
    ids=["by position", "by name", "default"],
)
def test_argument_is_read_by_its_name(args: tuple[float, ...], kwargs: dict[str, float], expected: float) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert read_argument(graph.call_function(op, (x, x, x, *args), kwargs), "dropout_p") == expected
