"""Checkpointed and divided models: what a layer saves by hand and by measurement, and what the options refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from compile_fsdp.cli import main
from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning import Backend, Estimate, estimate
from compile_fsdp.tools.planning.checkpointing import Checkpointing, Saved, SelectiveContexts
from compile_fsdp.tools.planning.configs import build_model, token_batch
from compile_fsdp.wrap import plan
from helpers.ranks.fake_world import fake_world
from helpers.ranks.peaks import adamw, peak_bytes

D, HEADS, KV, HIDDEN, VOCAB, LAYERS = 64, 4, 2, 160, 256, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCAB,
}
SIZE = (2, 64)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SELECTIVE, MATMULS = Checkpointing(Saved.SOME_MATMULS), Checkpointing(Saved.MATMULS)


def estimated(how: Checkpointing | None, tp: int = 1, backend: Backend = Backend.NCCL, **config: Any) -> Estimate:
    planned = plan(build_model(CONFIG | config, how, tp), mp_policy=BF16)
    return estimate(planned, token_batch(*SIZE), backend=backend)


def of_one_layer(how: Checkpointing | None, tp: int = 1) -> float:
    """Bytes that the forward saves of one layer for each token."""
    three, two = (estimated(how, tp, num_hidden_layers=layers).activations for layers in (3, 2))
    return float(three - two) / math.prod(SIZE)


# In bfloat16: a layer's input, and what attention returns with a float32 number per head.
INPUT, ATTENTION = 2 * D, 2 * D + 4 * HEADS
HEAD = D // HEADS


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Checkpointing(), INPUT),
        # The projections to queries, values, gate, and that back from the feed-forward.
        (SELECTIVE, INPUT + ATTENTION + 2 * (D + KV * HEAD + HIDDEN + D)),
        (Checkpointing(Saved.SOME_MATMULS, compiled=True), INPUT + ATTENTION + 2 * (D + KV * HEAD + HIDDEN)),
        (MATMULS, INPUT + ATTENTION + 2 * (D + 2 * KV * HEAD + D + 2 * HIDDEN + D)),
        (Checkpointing(Saved.MATMULS, compiled=True), INPUT + ATTENTION + 2 * (D + 2 * KV * HEAD + D + 2 * HIDDEN)),
    ],
)
def test_a_layer_saves(how: Checkpointing, expected: int) -> None:
    assert of_one_layer(how) == expected


def test_a_divided_layer_saves_its_part() -> None:
    """The input and the results of both reduce-scatters are parts of sequences, the last product is of whole ones."""
    parts = ATTENTION / 2 + 2 * (D / 2 + KV * HEAD / 2 + HIDDEN / 2) + 2 * D
    assert of_one_layer(SELECTIVE, tp=2) == 3 * INPUT / 2 + parts
    assert of_one_layer(Checkpointing(), tp=2) == INPUT / 2


def test_layers_between_checkpointed_ones_save_all() -> None:
    nothing, half, every = (
        estimated(how).activations for how in (None, Checkpointing(every=2), Checkpointing())
    )
    assert half - every == nothing - half > 0


@pytest.mark.parametrize("how", [Checkpointing(), SELECTIVE, MATMULS, Checkpointing(every=2)])
def test_peak_without_communication(how: Checkpointing) -> None:
    found = estimated(how, backend=Backend.FAKE).at(3)

    def batch() -> dict[str, Any]:
        return {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in token_batch(*SIZE).items()}

    with fake_world(3):
        measured = peak_bytes(lambda: plan(build_model(CONFIG, how), mp_policy=BF16), batch, adamw)
    assert found["peak"] == pytest.approx(measured, rel=1e-3)


def _some_matmuls() -> Any:
    return SelectiveContexts(every_second=True).make()


def test_the_compiled_layer_saves_what_is_estimated() -> None:
    """By the partitioner of torch's compiler, which reads the same choices."""
    model = build_model(CONFIG).to_empty(device="cpu").bfloat16()
    layer = model.get_submodule("model.layers.0")
    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, position_embeddings=(cos, sin))
        return result

    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.zeros(2, 64, D, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = torch.zeros(1, 64, HEAD, dtype=torch.bfloat16), torch.zeros(1, 64, HEAD, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: checkpoint(run, x, cos, sin, use_reentrant=False, context_fn=_some_matmuls),
        backend="aot_eager_decomp_partition",
        fullgraph=True,
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    rotations = {each.untyped_storage().data_ptr() for each in (cos, sin)}
    bytes_saved = sum(size for key, size in saved.items() if key not in weights | rotations)
    assert result.requires_grad
    assert bytes_saved == math.prod(SIZE) * of_one_layer(Checkpointing(Saved.SOME_MATMULS, compiled=True))


def test_tensor_parallelism_divides_matrices_and_keeps_norms() -> None:
    shapes = {
        tp: {name: tuple(each.shape) for name, each in build_model(CONFIG, tp=tp).named_parameters()} for tp in (1, 2)
    }
    whole, part = shapes[1], shapes[2]
    for name, shape in whole.items():
        if "norm" in name:
            assert part[name] == shape
        elif "o_proj" in name or "down_proj" in name:
            assert part[name] == (shape[0], shape[1] // 2)
        else:
            assert part[name] == (shape[0] // 2, *shape[1:])


def test_streams_keep_their_memory() -> None:
    """Beside what the computing stream needs: two buffers of gathers, and the gradients of a step."""
    model = build_model(CONFIG)
    found = estimate(plan(model, mp_policy=BF16), token_batch(*SIZE)).at(4)
    assert found["peak"] < found["reserved"]
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    root = sum(size for name, size in sizes.items() if ".layers." not in name)
    # The root's buffer is there while the first layer's is gathered, with its shards cast to bfloat16.
    gathers = 2 * (root + layer + layer / 4)
    # While the root's are reduced last, the gradients of the layers are there.
    gradients = 4 * sum(sizes.values()) / 4
    assert found["reserved"] >= found["peak"] + gradients / 2
    assert found["reserved"] <= found["peak"] + gathers + gradients


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--compile-layers"], "expected --checkpoint with --compile-layers"),
        (["--checkpoint", "100"], "expected at least 100 layers, got 32"),
        (["--tp", "3", "--seq-len", "12"], "expected sizes that 3 divides"),
        (["--tp", "8", "--seq-len", "40"], "got --seq-len 40 --tp 8"),
        (["--tp", "2", "--memory-budget", "1GiB"], "neither --memory-budget nor --network with --tp"),
        (["--checkpoint", "selective", "--network", "x.png"], "with a --checkpoint that saves outputs"),
    ],
)
def test_mistakes_get_one_line(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "8B", *options]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error" in each]
    assert line.startswith("compile-fsdp: error: ") and expected in line


@pytest.mark.parametrize("how", ["some", "0", "-1"])
def test_a_way_to_checkpoint_that_is_none_is_refused(how: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--preset", "8B", "--checkpoint", how])


def test_other_architectures_are_not_divided() -> None:
    with pytest.raises(EstimateError, match="with tensor parallelism, got 'gpt2'"):
        build_model({"model_type": "gpt2", "n_layer": 2}, tp=2)
