"""docs/errors.md quotes torch's messages and states compile_fsdp's outcomes correctly."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp import errors
from helpers.models.blockwise import shard_blocks
from helpers.pages.code_blocks import DOCS
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.tests import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)

    def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean() * len(name + "1")


class _ReadsAnother(Model):
    def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.layers[0].weight).mean()


class _GivesWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


class _UsesGiven(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_GivesWeight(8, 8)])

    def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        x, weight = self.layers[0](x)
        return (x @ weight.t()).mean()


class _Checkpointed(Model):
    def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, self.encode(x), use_reentrant=True)
        return x.mean()


class Way:
    """Shards and compiles with compile_fsdp, or with torch alone and `backend` (None: do not compile)."""

    def __init__(self, ours: bool, backend: str | None = None) -> None:
        self.fully_shard = compile_fsdp.fully_shard if ours else torch_fully_shard
        self.backend = "compile_fsdp" if ours else backend
        self.options = {"inner_backend": "aot_eager"} if ours else None

    def build(self, model: nn.Module | None = None, compiled: bool = True, **arguments: Any) -> Any:
        model = Model() if model is None else model
        shard_blocks(model, self.fully_shard, mesh=init_device_mesh("cpu", (2,)), **arguments)
        if compiled and self.backend is not None:
            model.compile(backend=self.backend, fullgraph=True, options=self.options)
        return model


X = torch.ones(4, 8)


def _replaces_parameter(way: Way) -> None:
    model = way.build()
    model.embedding.weight = nn.Parameter(torch.ones(8, 8))
    model(X)


def _child_first(way: Way) -> None:
    model = way.build()
    model.layers[0](X)
    model(X)


def _on_meta(way: Way) -> None:
    with torch.device("meta"):
        model = Model()
    way.build(model)(X)


def _mixed_dtypes(way: Way) -> None:
    model = Model()
    model.layers[0].bias.data = model.layers[0].bias.data.bfloat16()
    way.build(model)(X)


def _tied(way: Way) -> None:
    model = Model()
    model.layers[0].weight = model.embedding.weight
    way.build(model)(X)


def _loads_wrapped(way: Way) -> None:
    wrapped = torch.compile(way.build(compiled=False), backend="eager")
    way.build().load_state_dict(wrapped.state_dict())


def _clips_together(way: Way, are_both_sharded: bool) -> None:
    model, other = way.build(compiled=False), nn.Linear(8, 8)
    if are_both_sharded:
        way.fully_shard(other, mesh=shared_mesh("cpu", (1, 2), ("replicate", "shard")))
    (model(X) + other(X).mean()).backward()
    nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)


def _input_not_cast(way: Way) -> None:
    way.build(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))(X)


def _backward_twice(way: Way) -> None:
    loss = way.build()(X)
    loss.backward()
    loss.backward()


def _infers_first(way: Way) -> None:
    model = way.build()
    with torch.inference_mode():
        model(X)
    model(X)


def _inference_input(way: Way) -> None:
    with torch.inference_mode():
        x = torch.ones(4, 8)
    way.build()(x)


def _recompiles(way: Way) -> None:
    # torch alone does not compile a sharded model as one graph.
    model = way.build(compiled=False) if way.backend == "compile_fsdp" else Model()
    model.compile(backend=way.backend or "eager", fullgraph=True, options=way.options)
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("a", "ab"):
            model(X, name)


SAME = "same"
NOTHING = None

# By message: a program that makes torch raise it, and compile_fsdp's outcome: SAME message, own error type or NOTHING.
KNOWN: dict[str, tuple[Callable[[Way], object], str | type[Exception] | None]] = {
    "got mixed torch.Tensor and DTensor": (lambda way: way.build().encode(X), SAME),
    "setStorage": (lambda way: way.build(_UsesGiven())(X).backward(), SAME),
    "'Parameter' object": (_replaces_parameter, errors.ReplacedParameterError),
    "FSDP state has already": (_child_first, errors.RootError),
    "FSDP parameters should": (_on_meta, errors.ParameterDeviceError),
    "FSDP expects uniform": (_mixed_dtypes, errors.ParameterDtypeError),
    "Parameter '...' is shared": (_tied, SAME),
    "fully_shard does not support": (lambda way: way.fully_shard(Model().layers), SAME),
    "FSDP does not support deepcopy": (lambda way: copy.deepcopy(way.build()), SAME),
    "Can't pickle": (lambda way: torch.save(way.build(), io.BytesIO()), SAME),
    "object has no attribute 'no_sync'": (lambda way: way.build().no_sync(), SAME),
    "aten.copy_.default": (lambda way: way.build().load_state_dict(Model().state_dict()), SAME),
    "Unexpected key(s)": (_loads_wrapped, SAME),
    "aten._foreach_norm.Scalar": (lambda way: _clips_together(way, False), SAME),
    "All operands in aten.stack": (lambda way: _clips_together(way, True), SAME),
    "mat1 and mat2": (_input_not_cast, SAME),
    "Trying to backward": (_backward_twice, errors.SecondBackwardError),
    "Inplace update to inference tensor": (_infers_first, NOTHING),
    "Inference tensors cannot be saved": (_inference_input, SAME),
    "Attempted to call function marked as skipped": (lambda way: way.build()(X), NOTHING),
    "Hard failure": (_recompiles, SAME),
}

# Messages since torch 2.14.1, by earlier message; the page quotes both.
NEW_TEXTS = {"Attempted to call function marked as skipped": "Call to `torch._dynamo.disable()`"}

# Messages that torch raises only if it compiles, and messages that no short CPU test can provoke.
COMPILED = {"Attempted to call function marked as skipped", "Hard failure"}
NOT_MADE = {"Watchdog caught", "Recomputed values"}

# Further claims of the page about compile_fsdp: a program, and its error message (None: no error).
CLAIMS: dict[str, tuple[Callable[[Way], object], str | None]] = {
    "a parameter of another module": (
        lambda way: way.build(_ReadsAnother())(X),
        "while compiling the root (_ReadsAnother):\nthe root",
    ),
    "assign=True": (
        lambda way: way.build().load_state_dict(Model().state_dict(), assign=True),
        "'Parameter' object has no attribute '_local_tensor'",
    ),
    "no names with _orig_mod": (lambda way: way.build().load_state_dict(way.build().state_dict()), None),
    "reentrant checkpoints": (lambda way: way.build(_Checkpointed())(X).backward(), None),
}

PAGE = (DOCS / "errors.md").read_text().partition("## Error texts of torch")[2]
# Cause, remedy and outcome with compile_fsdp, by message.
ENTRIES = {
    heading: cells.split(" | ")
    for heading, cells in re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE, flags=re.MULTILINE)
}


def _said(program: Callable[[Way], object], way: Way) -> tuple[str, str]:
    """Return the error's type and message, both empty if there is no error."""
    torch._dynamo.reset()
    try:
        program(way)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _matches(heading: str, text: str) -> bool:
    return re.search(".*".join(map(re.escape, heading.split("..."))), text, flags=re.DOTALL) is not None


def _heading(start: str) -> str:
    [heading] = [each for each in ENTRIES if each.startswith(start)]
    return heading


def test_every_entry_is_reproduced_or_listed_in_not_made() -> None:
    assert sorted(map(_heading, {*KNOWN, *NOT_MADE})) == sorted(ENTRIES)


@pytest.mark.parametrize("heading", ENTRIES)
def test_entry_has_an_issue_link_and_a_remedy(heading: str) -> None:
    cause, remedy, _ = ENTRIES[heading]
    assert re.search(r"\[[\w-]+#\d+\]\(https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+\)", cause)
    assert remedy


@pytest.mark.parametrize("start", KNOWN)
def test_entry_states_the_outcome_with_compile_fsdp(start: str) -> None:
    outcome, (_, _, said) = KNOWN[start][1], ENTRIES[_heading(start)]
    if isinstance(outcome, type):
        assert said == f"`{outcome.__name__}`"
    else:
        assert said == ("none" if outcome is NOTHING else "")


@on_ranks(2, since="2.13")  # the page quotes the messages of 2.13
def test_messages_match_torch_and_outcomes_match_compile_fsdp(rank: int) -> None:
    for start, (program, outcome) in KNOWN.items():
        said = _said(program, Way(ours=False, backend="eager" if start in COMPILED else None))
        heading = NEW_TEXTS.get(start) if torch.__version__ >= "2.14.1" else None
        assert _matches(heading or _heading(start), said[1]), (start, said)
        kind, text = _said(program, Way(ours=True))
        if outcome == SAME:
            assert _matches(_heading(start), text), (start, kind, text)
        else:
            assert kind == (outcome.__name__ if isinstance(outcome, type) else ""), (start, kind, text)
    for claim, (program, expected_text) in CLAIMS.items():
        kind, text = _said(program, Way(ours=True))
        assert (kind == "") if expected_text is None else (expected_text in text), (claim, kind, text)
