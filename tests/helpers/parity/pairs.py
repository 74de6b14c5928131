"""Combinations of features: pairwise coverage, and groups of independent features."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from helpers.parity.check import Feature
from helpers.parity.features import BF16_FP32, FEATURES, always, tensor_parallel
from helpers.parity.steps import accumulate, two_forwards

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
    "precision": {"fp32": Feature(), "bf16": Feature(arguments=always(mp_policy=BF16_FP32), low_precision=True)},
    "step": {"once": Feature(), "accumulated": Feature(step=accumulate), "two forwards": Feature(step=two_forwards)},
    "reshard": {
        "default": Feature(),
        "kept": Feature(arguments=always(reshard_after_forward=False)),
        "offloaded": Feature(arguments=always(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    },
}


def combine(features: Sequence[Feature]) -> Feature:
    """Merge features into a single feature, with merged arguments of `fully_shard`."""
    default = Feature()
    changed: dict[str, Any] = {}
    for feature in features:
        for each in dataclasses.fields(Feature):
            value = getattr(feature, each.name)
            if value != getattr(default, each.name):
                assert each.name == "arguments" or changed.get(each.name, value) == value, each.name
                changed[each.name] = value
    if changed.get("case") == "used_twice" and changed.get("step") is two_forwards:
        # Four gradients are added, in eager mode one after the other, in graphs as two sums of two.
        changed["tolerance"] = 1e-5
    arguments = [feature.arguments for feature in features if feature.arguments is not None]
    if arguments:
        changed["arguments"] = lambda mesh: {name: value for make in arguments for name, value in make(mesh).items()}
    return Feature(**changed)


def cover_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows that contain every pair of values of two dimensions.

    Source: the greedy one-row-at-a-time construction of covering arrays (Cohen et al., AETG, 1997), without its
    random restarts: every row starts from the first uncovered pair and takes, dimension by dimension, the value with
    the most new pairs.
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
                new = [sum(tuple(sorted(((i, a), other))) in pairs for other in row.items()) for a in range(sizes[i])]
                row[i] = new.index(max(new))
        rows.append(tuple(row[i] for i in range(len(sizes))))
        pairs -= set(itertools.combinations(sorted(row.items()), 2))
    return rows


def _pairs() -> dict[str, Feature]:
    values = [list(dimension.items()) for dimension in DIMENSIONS.values()]
    rows = [
        [of_dimension[i] for of_dimension, i in zip(values, row, strict=True)]
        for row in cover_pairs([len(of_dimension) for of_dimension in values])
    ]
    return {", ".join(name for name, _ in row): combine([feature for _, feature in row]) for row in rows}


PAIRS = _pairs()


# Independent features that `make test` trains together. A bug in any feature of a group makes the group's run differ
# from eager FSDP2; `make test-all` has a row per feature, which shows the feature at fault.
_TOGETHER = (
    ("odd sizes", "adam, fused", "moved between steps"),
    ("columns", "custom communication", "clipped", "scale in the loss"),
    ("keep", "unused", "state dicts loaded"),
    ("cpu offload", "shared parameters", "not the last backward"),
    ("inputs not cast", "selective checkpoint", "grad scaler"),
    ("reshard set later", "frozen layers"),
    ("divide by 3, sums only", "group of modules"),
    ("all-reduce hook", "buffers", "accumulate sharded"),
    ("optimizer in backward", "late backward"),
    ("from meta", "late forward"),
    ("no_grad forward", "frozen layers first"),
    ("fp16", "checkpoint in nested modules"),
    ("below a wrapper", "moved to bf16"),
    ("replicated", "frozen"),
    ("output in fp64", "averaged", "convolutions"),
    ("int8 gather, uneven", "divisor set between"),
    ("views of views", "penalty in the loss"),
    ("penalty in the loss, kept", "reduce-scatter group of its own"),
    ("no unshard in backward", "two forwards, two backwards"),
    ("unused, reduced", "frozen between"),
)
TOGETHER = {" + ".join(names): combine([FEATURES[name] for name in names]) for names in _TOGETHER}
