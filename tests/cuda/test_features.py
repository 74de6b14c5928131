"""Features of FSDP2 compile to Triton kernels for an H100, with the scheduled collectives and without gloo's path."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend

from compile_fsdp.tools.explain.capture import capture
from helpers.cuda.calls import LAUNCHES, events, recording
from helpers.cuda.features import FEATURES, SINCE, run_steps
from helpers.cuda.target import h100
from helpers.graphs.capture import without_graph_caches
from helpers.ranks.fake_world import fake_world
from helpers.releases.skip import skip_before

# Collectives and waits of a step, and resizes of unsharded parameters, whose windows the passes have left: those of the
# root (embedding, norm, output) stay filled from the forward to the backward.
USUAL = "7 gather, 4 reduce, 11 wait; 6 resizes"
EXPECTED = {
    "hsdp": "7 gather, 4 reduce, 4 all-reduce, 15 wait; 6 resizes",
    "tensor parallel": "6 gather, 4 reduce, 9 all-reduce, 19 wait; 6 resizes",
    "offloading": "39 gather, 18 reduce, 18 offload, 18 fetch, 75 wait; 6 resizes",
    "large budget": "1 gather, 1 reduce, 2 wait; 48 resizes",
    "small groups": "2 gather, 2 reduce, 4 wait; 6 resizes",
    "frozen layers": "5 gather, 2 reduce, 7 wait; 6 resizes",
    "subclass gather": "13 gather, 4 reduce, 17 wait; 6 resizes",
    "meshes by parameter": "8 gather, 7 reduce, 15 wait; 6 resizes",
    "cuda graphs": "7 gather, 4 reduce, 11 wait; 0 resizes",
    "reshard to 2": "8 gather, 4 reduce, 12 wait; 48 resizes",  # of the parts between forward and backward
    "kept": "4 gather, 4 reduce, 8 wait; 48 resizes",
    "retained windows": "7 gather, 4 reduce, 11 wait; 90 resizes",
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_compiles(name: str) -> None:
    skip_before(SINCE.get(name, ""))
    with h100(), fake_world(8), without_graph_caches(), recording() as calls:
        model = run_steps(FEATURES[name])
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert {(grad.device.type, grad.dtype) for grad in grads} == {(FEATURES[name].device, torch.float32)}
    found = Counter(text.split()[0] for graph in (0, 1) for text in events([c for c in calls if c.graph == graph]))
    kinds = [f"{found[kind]} {kind}" for kind in (*LAUNCHES.values(), "wait") if found[kind]]
    resizes = sum(call.name == "resize_storage_bytes_" for call in calls)
    assert f"{', '.join(kinds)}; {resizes} resizes" == EXPECTED.get(name, USUAL)
    # Kernels copy, except to and from the host. The all-to-all is gloo's path.
    unexpected = {"clone", "_to_copy", "alltoall_base_", "chunk_cat", "copy_"}
    between = {"fetch", "offload", "wait_tensor"}
    if name == "cpu offload":
        unexpected.remove("copy_")
        between |= {"copy_", "split_with_sizes_copy"}  # reduced gradients are split on the host
    assert unexpected.isdisjoint(call.name for call in calls)
    for call in calls:
        assert call.name in between or all(arg.is_cuda for arg in call.args if isinstance(arg, torch.Tensor)), call.name


@pytest.mark.parametrize(
    "attention", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
)
def test_equal_blocks_are_compiled_once(attention: SDPBackend) -> None:
    with h100(attention), fake_world(8), capture() as captured:
        run_steps(FEATURES["mixed precision"])
    found = [[operation for event in graph.events for operation in event.operations] for graph in captured.graphs]
    assert [operations.count("compile_fsdp.call_block") for operations in found] == [3, 6]  # a backward has two parts
