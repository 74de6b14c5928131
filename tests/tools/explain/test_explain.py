"""`explain` of models in several process groups, with graph breaks and recompiles; most without Inductor."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.cpp_builder import CppBuilder

import compile_fsdp
from compile_fsdp.errors import ExplainError, NothingSelectedError
from compile_fsdp.tools.explain.capture import Place, Recompile, capture
from compile_fsdp.tools.explain.report import make_report
from compile_fsdp.torch_compat.dynamo import graph_break_logger
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.ranks.fake_world import fake_world

EAGERLY = {"inner_backend": "aot_eager"}


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()  # the line that a report names
        return self.norm(self.layers[1](x))


def _break_line() -> int:
    lines, first = inspect.getsourcelines(Breaking.forward)
    return first + next(i for i, line in enumerate(lines) if "graph_break" in line)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_graph_break_has_the_users_line() -> None:
    logger = graph_break_logger
    before = logger.level, logger.propagate, list(logger.handlers)
    report = compile_fsdp.explain(Breaking(), torch.randn(4, 4), world_size=4, options=EAGERLY)
    assert [(found.place.filename, found.place.line) for found in report.breaks] == [(__file__, _break_line())]
    (found,) = report.breaks
    assert found.place.source.startswith("torch._dynamo.graph_break()")
    assert "graph_break()" in found.reason and found.explanation
    assert "User code traceback" not in found.explanation
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_explain_leaves_model_and_rng_state_unchanged() -> None:
    model = Breaking()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    batch = torch.randn(4, 4)
    state = torch.get_rng_state()
    compile_fsdp.explain(model, batch, world_size=4, options=EAGERLY)
    assert not dist.is_initialized()
    assert type(model) is Breaking and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_second_explain_compiles_no_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are not taken from a cache, because the passes must run on them; compiled kernels are."""
    built = []
    build = CppBuilder.build

    def build_and_count(self: CppBuilder) -> None:
        built.append(self)
        build(self)

    model, batch = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))), torch.ones(2, 4)
    first = compile_fsdp.explain(model, batch, world_size=4)
    monkeypatch.setattr(CppBuilder, "build", build_and_count)
    torch._dynamo.reset()
    second = compile_fsdp.explain(model, batch, world_size=4)
    assert built == []
    assert second.to_dict() == first.to_dict()
    assert len(second.graphs) == 2 and all(len(graph.stages) > 2 for graph in second.graphs)


def test_sharded_model_is_explained_in_place() -> None:
    with fake_world(4):
        model = shard_blocks(Breaking())
        model(torch.randn(4, 4)).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert not any(grad is None for grad in grads)
        mean = model.norm.running_mean.clone()
        report = compile_fsdp.explain(model, torch.randn(4, 4) + 5, options=EAGERLY)
        assert report.world_size == 4 and len(report.breaks) == 1
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
        assert torch.equal(model.norm.running_mean, mean)
        with pytest.raises(ExplainError, match="expected world_size=4"):
            compile_fsdp.explain(model, torch.randn(4, 4), world_size=8)


class _Averaging(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean = self.mean + x.detach().mean(0)
        return x


def test_model_that_an_evaluation_left_unsharded_is_unchanged() -> None:
    with fake_world(4):
        model = compile_fsdp.fully_shard(_Averaging())
        sharded = list(model.parameters())
        model(torch.ones(4, 4)).sum().backward()
        grads = [parameter.grad for parameter in sharded]
        values = [grad.to_local().clone() for grad in grads]  # type: ignore[union-attr]
        with torch.no_grad():
            model(torch.ones(4, 4))
        buffer, mean = model.mean, model.mean.clone()
        compile_fsdp.explain(model, torch.ones(4, 4), options=EAGERLY)
        assert all(parameter.grad is grad for parameter, grad in zip(sharded, grads, strict=True))
        assert all(torch.equal(grad.to_local(), value) for grad, value in zip(grads, values, strict=True))  # type: ignore[union-attr]
        assert model.mean is buffer and torch.equal(model.mean, mean)


class _Generator(nn.Sequential):
    pass


class _Chain(nn.Module):
    def __init__(self, models: list[nn.Sequential]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for model in self.models:
            x = model(x)
        return x


@pytest.mark.parametrize(
    ("cls", "is_one_graph", "name"),
    [(_Generator, False, "_Generator"), (nn.Sequential, False, "Sequential 2"), (_Generator, True, "_Generator")],
)
def test_equal_names_in_two_models_are_told_apart(cls: type[nn.Sequential], is_one_graph: bool, name: str) -> None:
    with fake_world(4), capture() as captured:
        models = [kind(nn.Linear(8, 8), nn.Linear(8, 8)) for kind in (nn.Sequential, cls)]
        for model in models:
            compile_fsdp.fully_shard(model[0], reshard_after_forward=model is models[1])
            compile_fsdp.fully_shard(model)
        for run in [_Chain(models)] if is_one_graph else models:
            compile_whole(run)(torch.ones(4, 8)).sum().backward()
        shards = [parameter.to_local() for model in models for parameter in model.parameters()]
    report = make_report(captured, "script.py", 4)
    assert len(report.graphs) == (2 if is_one_graph else 4)
    rows = {row.facts.name: row for row in report.groups}
    assert set(rows) == {"Sequential.0", "Sequential", f"{name}.0", name}
    assert report.shard_bytes == sum(shard.nbytes for shard in shards)
    assert {row.reductions for row in rows.values()} == {1} and all(row.gathers for row in rows.values())
    kept = {group: {fqn for fqn, _ in row.kept} for group, row in rows.items()}
    assert kept["Sequential.0"] == {"Sequential.0.weight", "Sequential.0.bias"} and kept[f"{name}.0"] == set()
    assert kept[name] == {f"{name}.1.weight", f"{name}.1.bias"}
    parameters = {fqn for row in rows.values() for fqn in row.facts.parameters}
    assert len(parameters) == len(shards)
    assert {fqn for each in report.timeline for fqn in (*each.event.parameters, *each.event.gradients)} == parameters


def test_meta_model_is_explained_on_cpu() -> None:
    with torch.device("meta"):
        model = Breaking()
    report = compile_fsdp.explain(model, torch.randn(4, 4), world_size=64, options=EAGERLY)
    assert report.model == "Breaking" and report.world_size == 64
    assert next(model.parameters()).is_meta


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ExplainError, match="expected an initialised process group"):
        compile_fsdp.explain(Breaking(), torch.randn(4, 4))
    with pytest.raises(ExplainError, match="at least 1, got 0"):
        compile_fsdp.explain(Breaking(), torch.randn(4, 4), world_size=0)
    with pytest.raises(NothingSelectedError):
        compile_fsdp.explain(nn.Linear(4, 4), torch.randn(4, 4), world_size=2)
    assert not dist.is_initialized()


def test_recompile_has_the_line_of_the_call() -> None:
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: bool) -> torch.Tensor:
            return self.layer(x) * (2 if scale else 1)

    with fake_world(2), capture() as captured:
        model = Sharded()
        compile_fsdp.fully_shard(model)
        model.compile(backend="compile_fsdp", options=EAGERLY)
        model(torch.randn(2, 4), False)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        model(torch.randn(2, 4), True)
    assert [(each.place.filename, each.place.line) for each in captured.recompiles] == [(__file__, line)]
    assert captured.recompiles[0].function == "the model"
    assert "scale" in captured.recompiles[0].reason or "args" in captured.recompiles[0].reason
    assert captured.breaks == []


@pytest.mark.parametrize(
    ("name", "filename", "function"),
    [("_call_impl_7", "module.py", "the model"), ("forward", "<eval_with_key>.3", "the backward"), ("f", "f.py", "f")],
)
def test_equal_recompilations_are_listed_once(
    name: str, filename: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"compile_id": "0/1", "co_firstlineno": 1, "start_time_us": 2**62, "recompile_reason": "0/0: x == 1"}
    compiled = SimpleNamespace(co_name=name, co_filename=filename, **fields)
    monkeypatch.setattr("compile_fsdp.tools.explain.capture.last_compilations", lambda: [compiled] * 3)
    with capture() as captured:
        pass
    assert captured.recompiles == [Recompile(Place.at(filename, 1), function, "x == 1", times=3)]


def test_warnings_and_missing_inductor_graphs_are_noted() -> None:
    with capture() as captured:
        logging.getLogger("compile_fsdp").warning("backward falls back to %s", "eager")
    report = make_report(captured, "script.py", 1)
    assert report.notes[0] == "backward falls back to eager"
    assert "No graph was compiled by Inductor" in report.notes[1]
    assert report.to_dict()["figures"]["graph_s"] == []
