"""Modules that each policy selects, on meta without a process group."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp.errors import PolicyError
from compile_fsdp.wrap import CustomPolicy, ModuleWrapPolicy, Policy, RepeatedBlocksPolicy, SizePolicy
from helpers.models.reference import CASES
from helpers.models.stacks import Block, Pair


def selected(
    policy: Policy, root: nn.Module, ignored: tuple[nn.Module, ...] = (), **root_kwargs: Any
) -> dict[str, Mapping[str, Any]]:
    below = {each for module in ignored for each in module.modules()}
    names = {module: fqn for fqn, module in root.named_modules()}
    return {names[module]: kwargs for module, kwargs in policy.select(root, below, root_kwargs).items()}


def linears(*sizes: int) -> list[nn.Module]:
    """Linear layers without bias; size n has n * n elements."""
    return [nn.Linear(size, size, bias=False) for size in sizes]


class Reads(nn.Module):
    """A block made of several modules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"part{index}", part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Other(Reads):
    pass


def test_module_wrap_takes_subclasses_and_skips_ignored_modules() -> None:
    model = nn.Sequential(Reads(Reads(*linears(2))), Other(*linears(2)), Other(Other(*linears(2))))
    assert selected(ModuleWrapPolicy({Reads}), model, ignored=(model[2],)) == {"0": {}, "0.part0": {}, "1": {}}


def test_module_wrap_refuses_names() -> None:
    with pytest.raises(PolicyError, match=r"expected module classes, got \['Block'\]"):
        ModuleWrapPolicy({"Block"})  # type: ignore[arg-type]


def test_custom_policy_gives_arguments_per_module() -> None:
    model = nn.Sequential(*linears(2, 3, 4, 5))
    answers = {2: True, 3: {"reshard_after_forward": False}, 4: False, 5: {}}
    policy = CustomPolicy(lambda module: answers[module.in_features])
    assert selected(policy, model) == {"0": {}, "1": {"reshard_after_forward": False}, "3": {}}


def test_custom_function_is_not_called_for_ignored_modules_and_the_root() -> None:
    model = nn.Sequential(Reads(*linears(2)), *linears(3))
    asked = []
    selected(CustomPolicy(lambda module: bool(asked.append(module))), model, ignored=(model[0],))
    assert asked == [model[1]]


def test_custom_policy_names_every_invalid_result() -> None:
    model = nn.Sequential(*linears(2, 3, 4))
    policy = CustomPolicy(lambda module: None if module.in_features < 4 else True)  # type: ignore[arg-type, return-value]
    with pytest.raises(PolicyError, match=r"True, False or a dict of arguments, got \{'0': None, '1': None\}"):
        selected(policy, model)


def test_size_policy_counts_parameters_not_selected_below() -> None:
    # 100 selects the linear layers of size 10 and the first block (64 + 36), not the second (81) nor the root.
    model = nn.Sequential(Reads(*linears(8, 6)), Reads(*linears(10, 9)), *linears(10))
    assert list(selected(SizePolicy(100), model)) == ["0", "1.part0", "2"]
    assert list(selected(SizePolicy(101), model)) == ["1"]


def test_size_policy_counts_shared_parameters_once_and_ignored_never() -> None:
    model = Reads(Reads(*linears(10, 10)), Reads(*linears(10)))
    model.part0.part1.weight = model.part0.part0.weight  # type: ignore[union-attr, assignment]
    assert list(selected(SizePolicy(101), model)) == []
    assert list(selected(SizePolicy(100), model)) == ["part0.part0", "part1.part0"]
    assert list(selected(SizePolicy(100), model, ignored=(model.part1,))) == ["part0.part0"]  # type: ignore[arg-type]
    assert list(selected(SizePolicy(100), model, ignored_params={model.part1.part0.weight})) == [  # type: ignore[union-attr]
        "part0.part0"
    ]


def test_size_policy_skips_containers_excluded_classes_and_uncalled_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Reads(*linears(10)), Other(*linears(10))])
            self.attention = nn.MultiheadAttention(16, 2)

    with torch.device("meta"):
        model = Model()
    assert list(selected(SizePolicy(100), model)) == ["layers.0.part0", "layers.1.part0", "attention"]
    assert list(selected(SizePolicy(100, exclude=(nn.Linear, Other)), model)) == ["layers.0", "attention"]


@pytest.mark.parametrize(
    "case, expected",
    [
        ("mlp", ["layers.0", "layers.1"]),
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),
        ("transformer_tied", ["layers.0", "layers.1"]),
        ("nested", ["pairs.0", "pairs.1"]),
        ("tied_ends", []),
    ],
)
def test_repeated_blocks_policy_selects_the_blocks_of_models(case: str, expected: list[str]) -> None:
    with torch.device("meta"):
        model = CASES[case]().model
    assert list(selected(RepeatedBlocksPolicy(), model)) == expected


def test_repeated_blocks_are_found_in_encoder_and_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=2, num_heads=2, vocab_size=16)
        )
    assert list(selected(RepeatedBlocksPolicy(), model)) == ["encoder.block.0", "decoder.block.0", "decoder.block.1"]


def test_repeated_blocks_are_the_outermost_blocks_not_single_layers() -> None:
    experts = [nn.ModuleList([Other(*linears(2)), Other(*linears(2))]) for _ in range(2)]
    stem = nn.Sequential(*linears(3, 3), nn.ReLU(), nn.ReLU())
    model = nn.Sequential(stem, nn.Sequential(Reads(experts[0])), nn.Sequential(Reads(experts[1])))
    assert list(selected(RepeatedBlocksPolicy(), model)) == ["1.0", "2.0"]
    assert list(selected(RepeatedBlocksPolicy(), nn.Sequential(stem))) == ["0.0", "0.1"]
    assert RepeatedBlocksPolicy().block_classes(nn.Sequential(stem)) == [nn.Linear]


def test_repeated_blocks_skip_ignored_modules() -> None:
    model = nn.Sequential(*(Reads(*linears(2)) for _ in range(3)))
    assert list(selected(RepeatedBlocksPolicy(), model, ignored=(model[1],))) == ["0", "2"]
    assert list(selected(RepeatedBlocksPolicy(), model, ignored=(model[1], model[2]))) == ["0"]


def test_union_selects_all_modules_and_the_last_given_argument_wins() -> None:
    model = nn.Sequential(*linears(2, 3, 4))
    answers: dict[int, Any] = {2: {"reshard_after_forward": False, "mp_policy": 1}, 3: True}
    own = SimpleNamespace(select=lambda *_: {model[0]: {"reshard_after_forward": 2}, model[2]: {}})  # not Combinable
    ours = CustomPolicy(lambda module: answers.get(module.in_features, False))
    assert selected(ours | own, model) == {"0": {"reshard_after_forward": 2, "mp_policy": 1}, "1": {}, "2": {}}
    assert selected(own | ours, model) == {"0": {"reshard_after_forward": False, "mp_policy": 1}, "1": {}, "2": {}}
    everything = ModuleWrapPolicy({nn.Linear})  # keeps the arguments that the other policy gives
    assert selected(ours | everything, model) == selected(everything | ours, model)


def test_policy_repr() -> None:
    policy = ModuleWrapPolicy({Pair, Block}) | SizePolicy(9) | CustomPolicy(linears)  # type: ignore[arg-type]
    assert repr(policy) == (
        "ModuleWrapPolicy({Block, Pair}) | SizePolicy(min_params=9, exclude=()) | CustomPolicy(linears)"
    )
