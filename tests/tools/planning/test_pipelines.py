"""Stages of pipelines: estimated peaks against torch's own schedule, and how layers and microbatches are divided."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from compile_fsdp.cli import main
from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning import Backend, Estimate, estimate
from compile_fsdp.tools.planning.configs import build_model, token_batch
from compile_fsdp.tools.planning.estimates import largest
from compile_fsdp.tools.planning.pipelines import Place, Stage, distinct_places, layers_of, stage_batch
from compile_fsdp.wrap import apply, plan
from helpers.models.configs import LLAMA
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.peaks import adamw, peak_of
from helpers.ranks.pools import device_type, run_ranks

WIDTH, ROWS = 64, 96
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(output: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = output.float().square().mean()
    return loss


class Part(nn.Module):
    """Two layers, and in the last stage a head, with the loss unless the schedule computes it."""

    def __init__(self, place: Place, has_loss: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5 * WIDTH, bias=False) if place.is_last else nn.Identity()
        self.has_loss = place.is_last and has_loss

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        output: torch.Tensor = self.head(inputs_embeds)
        return SimpleNamespace(loss=loss_of(output), output=output) if self.has_loss else output


def planned(place: Place, has_loss: bool, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return plan(Part(place, has_loss), **kwargs)


def estimated(place: Place, dtype: torch.dtype, **kwargs: Any) -> Estimate:
    batch = {"inputs_embeds": torch.zeros(ROWS, WIDTH, dtype=dtype)}
    if not place.is_last:
        batch["output_gradient"] = torch.zeros(ROWS, WIDTH, dtype=dtype)
    return estimate(planned(place, True, **kwargs), batch, backend=Backend.GLOO, place=place)


def measured(place: Place, mesh: DeviceMesh, dtype: torch.dtype, **kwargs: Any) -> int:
    """The peak of two steps of torch's own schedule, on a rank of this stage."""

    def train() -> None:
        model = apply(planned(place, False, mesh=mesh["dp"], **kwargs)).to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        device, group = torch.device("cpu"), mesh["pp"].get_group()
        stage = PipelineStage(model, place.stage, place.stages, device, group=group)
        schedule = Schedule1F1B(stage, place.microbatches, loss_fn=loss_of)
        optimizer = adamw(model)
        inputs = torch.zeros(place.microbatches * ROWS, WIDTH, dtype=dtype)
        targets = {"target": torch.zeros(place.microbatches)} if place.is_last else {}
        for _ in range(2):
            schedule.step(*([inputs] if place.is_first else []), **targets, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()

    return peak_of(train)


TRAININGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    # Gradients are added in float32, and parameters stay unsharded.
    "kept": (torch.bfloat16, {"mp_policy": LOW, "reshard_after_forward": False}),
    "resharded": (torch.float32, {}),
}


def _measure(rank: int, name: str, microbatches: int) -> int:
    """The smallest of five runs: gloo's threads may hold on to the tensors of collectives that are over."""
    dtype, kwargs = TRAININGS[name]
    mesh = shared_mesh(device_type(), (2, 2), ("pp", "dp"))
    place = Place(rank // 2, 2, microbatches)
    return min(measured(place, mesh, dtype, **kwargs) for _ in range(5))


@pytest.mark.parametrize("name", ["kept", pytest.param("resharded", marks=pytest.mark.slow)])
def test_peak_is_that_of_torchs_schedule(name: str) -> None:
    dtype, kwargs = TRAININGS[name]
    peaks = run_ranks(4, _measure, name, 4)
    for stage in (0, 1):
        peak = estimated(Place(stage, 2, 4), dtype, **kwargs).at(2)["peak"]
        measured = min(peaks[2 * stage : 2 * stage + 2])
        # By when its peer sends, a stage still holds the input and the output of one microbatch when it begins another.
        late = ROWS * WIDTH * (6 if stage == 1 else 2) * dtype.itemsize
        assert 0.95 * measured - late <= peak <= 1.05 * measured


def test_stages_hold_as_many_microbatches_as_follow_them() -> None:
    places = [Place(stage, 4, 6) for stage in range(4)]
    assert [place.in_flight for place in places] == [4, 3, 2, 1]
    assert [Place(stage, 4, 2).in_flight for stage in range(4)] == [2, 2, 2, 1]
    for place in (*places, Place(0, 4, 4), Place()):
        level = most = 0
        for is_forward in place.order():
            level += 1 if is_forward else -1
            most = max(most, level)
        assert (level, most) == (0, place.in_flight)
    assert [place.stage for place in distinct_places(2, 2)] == [0, 1]
    assert [place.stage for place in distinct_places(8, 8)] == [0, 1, 7]


def test_layers_are_divided_as_llama_3_did() -> None:
    """126 layers of 405B in 8 parts, of which the first and the last have the embedding and the head, too."""
    parts = [layers_of(Place(stage, 8, 8), 126) for stage in range(8)]
    assert [len(part) for part in parts] == [15, 16, 16, 16, 16, 16, 16, 15]
    assert [layer for part in parts for layer in part] == list(range(126))
    with pytest.raises(EstimateError, match="3 layers for 4; lower --pp"):
        layers_of(Place(0, 4, 4), 3)


def test_more_microbatches_repeat_what_a_traced_one_does() -> None:
    """Each gathers again, has buffers for what is received, and keeps the gradient of its input."""
    dtype, kwargs = TRAININGS["resharded"]
    three, four, five = (estimated(Place(1, 2, count), dtype, **kwargs).at(2) for count in (3, 4, 5))
    hidden = 4 * ROWS * WIDTH
    for name, more in (("all_gathers", 2), ("received", hidden), ("batch", hidden), ("peak", 2 * hidden)):
        assert five[name] - four[name] == four[name] - three[name] == more
    assert three["activations"] == five["activations"]
    kept = estimated(Place(1, 2, 5), *TRAININGS["kept"][:1], **TRAININGS["kept"][1]).at(2)
    assert (kept["all_gathers"], kept["reduce_scatters"]) == (3, 3)


CONFIG = LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": False}


def _of_stage(place: Place) -> Estimate:
    hidden = torch.empty(2, 32, 64, dtype=torch.bfloat16, device="meta")
    stage = Stage(build_model(CONFIG), place)
    batch = stage_batch(token_batch(2, 32), place, hidden)
    return estimate(plan(stage, stage.policy, mp_policy=LOW), batch, place=place)


def test_stages_of_a_language_model_hold_all_of_it_once() -> None:
    stages = [_of_stage(Place(stage, 3, 6)) for stage in range(3)]
    whole = sum(parameter.nbytes for parameter in build_model(CONFIG).parameters())
    assert 2 * sum(each.at(2)["parameters"] for each in stages) == whole
    most = largest(stages)
    for name, formula in most.formulas().items():
        assert most.at(8)[name] == max(each.at(8)[name] for each in stages), formula
    assert [each.at(2)["received"] for each in stages] == [6 * 2 * 32 * 64 * 2 * ends for ends in (1, 2, 1)]


def test_shared_embeddings_are_refused() -> None:
    with pytest.raises(EstimateError, match="with tie_word_embeddings=True; plan it without --pp"):
        Stage(build_model(CONFIG | {"tie_word_embeddings": True}), Place(0, 2, 2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pp", "0"], "got --pp 0"),
        (["--microbatches", "4"], "expected --microbatches with --pp"),
        (["--pp", "4", "--microbatches", "2"], "at least as many as stages, got --pp 4 --microbatches 2"),
        (["--pp", "2", "--memory-budget", "1GiB"], "neither --memory-budget nor --network with --pp"),
    ],
)
def test_mistakes_get_one_line(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "8B", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compile-fsdp: error: ") and expected in line


@pytest.mark.slow
def test_the_command_shows_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--hf-config", str(config), "--seq-len", "32", "--world", "4", "--json", str(output), "--float8"]
    assert main(["plan", *options, "--pp", "2", "--microbatches", "3", "--tp", "2", "--replicate", "2"]) == 0
    assert "stages of the pipeline" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert set(found["stages"]) == {"0", "1"}
    assert found["ranks"]["2"]["peak"] == max(stage["2"]["peak"] for stage in found["stages"].values())
