"""torch's dispatcher as this package reads it."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp.torch_compat.dispatch import read_argument


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
