"""The wrapper that Inductor generates for an H100 calls kernels and collectives in the order of the passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from textwrap import fill

import pytest
from expecttest import assert_expected_inline

from compile_fsdp.tools.explain.capture import CapturedGraph, capture
from compile_fsdp.tools.explain.events import Kind
from helpers.cuda.calls import PRODUCTS, Call, events, recording
from helpers.cuda.features import FEATURES, run_steps
from helpers.cuda.target import h100
from helpers.graphs.capture import without_graph_caches
from helpers.ranks.fake_world import fake_world


def _collapse(texts: Sequence[str]) -> list[str]:
    """Join consecutive equal texts."""
    return [text for text, _ in groupby(texts)]


def _called(calls: Sequence[Call], by_number: bool = False) -> list[str]:
    """List a wrapper's collectives, waits, and runs of matrix products."""
    return _collapse(["compute" if text in PRODUCTS else text for text in events(calls, by_number)])


def _decided(graph: CapturedGraph) -> list[str]:
    """List the same events of a graph behind the passes."""
    texts = []
    launches: list[str] = []
    for event in graph.events:
        if event.kind is Kind.COMPUTE:
            texts += ["compute"] if any("mm" in each or "call_block" in each for each in event.operations) else []
        elif event.kind is Kind.WAIT:
            texts.append(f"wait {launches[event.collective]}")
        elif event.kind is not Kind.COPY:
            launches.append(f"{event.kind.value} {event.collective}")
            texts.append(launches[-1])
    return _collapse(texts)


@pytest.mark.parametrize("name", ["mixed precision", "hsdp", "small groups", "uneven", "large budget"])
def test_wrapper_calls_in_the_order_of_the_passes(name: str) -> None:
    with h100(), fake_world(8), capture() as captured, recording() as calls:
        run_steps(FEATURES[name], count=2)
    assert len(captured.graphs) == 2
    for number, graph in enumerate(captured.graphs):
        for step in (0, 2):  # the second step runs the compiled graphs again
            assert _called([call for call in calls if call.graph == number + step], by_number=True) == _decided(graph)
    assert len({call.stream for call in calls if call.is_kernel}) == 1


def test_wrapper_hides_collectives_behind_compute_and_calls_no_other_ops() -> None:
    with h100(), fake_world(8), without_graph_caches(), recording() as calls:
        run_steps(FEATURES["mixed precision"])
    forward, backward = (fill(", ".join(_called([c for c in calls if c.graph == i])), 110) for i in (0, 1))
    assert_expected_inline(
        forward,
        """\
gather root, gather layers.0, wait gather root, gather layers.1, wait gather layers.0, compute, gather
layers.2, wait gather layers.1, compute, wait gather layers.2, compute""",
    )
    assert_expected_inline(
        backward,
        """\
gather layers.2, compute, gather layers.1, wait gather layers.2, compute, reduce layers.2, gather layers.0,
wait gather layers.1, compute, wait reduce layers.2, reduce layers.1, wait gather layers.0, compute, wait
reduce layers.1, reduce layers.0, wait reduce layers.0, reduce root, wait reduce root""",
    )
    assert any(call.is_kernel for call in calls)
    counts = Counter(call.name for call in calls if not call.is_kernel)
    assert_expected_inline(
        "\n".join(f"{count} {name}" for name, count in sorted(counts.items())),
        """\
3 _scaled_dot_product_flash_attention
3 _scaled_dot_product_flash_attention_backward
7 all_gather_into_tensor
11 cat
48 mm
4 reduce_scatter_tensor
6 resize_storage_bytes_
11 split_with_sizes_copy
11 wait_tensor""",
    )
