"""Pairs of features: rows in which every two values of different dimensions meet."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from features import BF16_FP32, accumulate, always, tensor_parallel, two_forwards
from parity import Feature

DIMENSIONS: dict[str, dict[str, Feature]] = {
    "model": {
        "mlp": Feature(),
        "frozen": Feature(case="frozen"),
        "checkpointed": Feature(case="checkpoint_inside"),
        "used twice": Feature(case="used_twice"),
    },
    "mesh": {
        "dp": Feature(),
        "hsdp": Feature(mesh={"replicate": 2, "shard": 0}),
        "tp": Feature(mesh={"dp": 2, "tp": 0}, data_mesh=("dp",), parallelize=tensor_parallel),
    },
    "precision": {
        "fp32": Feature(),
        "bf16": Feature(arguments=always(mp_policy=BF16_FP32), low_precision=True),
    },
    "step": {
        "once": Feature(),
        "accumulated": Feature(step=accumulate),
        "two forwards": Feature(step=two_forwards),
    },
    "reshard": {
        "default": Feature(),
        "kept": Feature(arguments=always(reshard_after_forward=False)),
        "offloaded": Feature(arguments=always(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    },
}


def combine(features: Sequence[Feature]) -> Feature:
    """One feature that sets what all of them set; arguments of `fully_shard` are put together."""
    default = Feature()
    changed: dict[str, Any] = {}
    for feature in features:
        for each in dataclasses.fields(Feature):
            value = getattr(feature, each.name)
            if value != getattr(default, each.name):
                assert each.name == "arguments" or changed.get(each.name, value) == value, each.name
                changed[each.name] = value
    if changed.get("case") == "used_twice" and changed.get("step") is two_forwards:
        # Four gradients are added up, in eager mode one after the other, in graphs two and two.
        changed["tolerance"] = 1e-5
    arguments = [feature.arguments for feature in features if feature.arguments is not None]
    if arguments:
        changed["arguments"] = lambda mesh: {name: value for make in arguments for name, value in make(mesh).items()}
    return Feature(**changed)


def cover_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one value per dimension in which each pair of values of two dimensions meets.

    Source: the greedy one-row-at-a-time construction of covering arrays (Cohen et al., AETG, 1997), without its
    random restarts: every row starts from the first pair that is left and takes, dimension by dimension, the value
    with the most new pairs.
    """
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    rows = []
    while pairs:
        row: dict[int, int] = dict(min(pairs))
        for i in range(len(sizes)):
            if i not in row:
                row[i] = max(range(sizes[i]), key=lambda a, i=i: _count_new(pairs, row, (i, a)))  # type: ignore[misc]
        rows.append(tuple(row[i] for i in range(len(sizes))))
        pairs -= set(itertools.combinations(sorted(row.items()), 2))
    return rows


def _count_new(pairs: set[Any], row: dict[int, int], item: tuple[int, int]) -> int:
    return sum(tuple(sorted((item, other))) in pairs for other in row.items())


def _pairs() -> dict[str, Feature]:
    values = [list(dimension.items()) for dimension in DIMENSIONS.values()]
    rows = [
        [of_dimension[i] for of_dimension, i in zip(values, row, strict=True)]
        for row in cover_pairs([len(of_dimension) for of_dimension in values])
    ]
    return {", ".join(name for name, _ in row): combine([feature for _, feature in row]) for row in rows}


PAIRS = _pairs()
