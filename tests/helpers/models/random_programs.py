"""Random training programs: module trees with sharing, freezing, checkpoints, control flow and sharding.

A program is a value, so a program shrunk by hypothesis can be printed and kept as a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

FEATURES = 5  # of every activation; not a multiple of the number of ranks
ROWS = 3

LEAVES = ("linear", "mlp", "int8", "norm", "scale", "buffer", "dtensor", "again")
INNER = ("chain", "sum", "dict", "heads", "gate", "break")
STEPS = ("plain", "sum", "apart", "no_grad", "accumulate", "eval", "half", "inputs", "kept", "part", "stages")


@dataclass(frozen=True)
class Part:
    """One module."""

    kind: str  # of its forward, see `PartModule.body` of `program_training`
    children: tuple[Part, ...] = ()  # modules of an inner part
    # Hidden width of an "mlp" of FEATURES features; index of the earlier sharded module that "again" runs.
    number: int = 3
    times: int = 1  # how often the forward runs it in a row
    frozen: str = ""  # which of its own parameters are frozen: "" for none, "all", or "vectors" for all except matrices
    is_checkpointed: bool = False  # whether its activations are recomputed
    is_sharded: bool = False  # whether it is sharded as a separate parameter group
    keeps: bool | None = None  # whether it stays unsharded between forward and backward; None for torch's default


@dataclass(frozen=True)
class Program:
    """A model and how it is trained."""

    root: Part  # always sharded
    steps: tuple[str, ...] = ("plain", "plain", "plain")  # kinds, see `Training.step` of `program_training`
    flags: tuple[bool, ...] = (True, True, True)  # branch of the control flow in each step, equal on all ranks
    in_bfloat16: bool = False  # whether parameters are gathered in 16 bits, for compute in 16 bits
    prefetches: bool = False  # whether every sharded module prefetches the next sharded module
    budget: tuple[str, int] | None = None  # name and bytes of the backend's option that limits memory
    inner_backend: str = "aot_eager"  # the passes run only with Inductor
    rows: int = ROWS  # of a batch on each rank
    features: int = FEATURES  # of every activation

    @property
    def has_breaks(self) -> bool:
        return any(part.kind in ("gate", "break") for part in walk(self.root))

    @property
    def adds_in_another_order(self) -> bool:
        """Whether gradients may be added in a different order than in eager FSDP2.

        Two cases differ. A layer runs several times, in forwards that share a backward or in a checkpoint, or more
        than twice around graph breaks: eager autograd adds all its gradients one after the other, AOTAutograd first
        adds the gradients of one forward graph. A layer has gradients of an earlier microbatch: eager FSDP2 reduces
        them separately, when the first of its backwards ends.
        """
        parts = list(walk(self.root))
        is_split = not {"sum", "accumulate"}.isdisjoint(self.steps) or any(part.is_checkpointed for part in parts)
        if is_split and (max(_runs(self.root)) > 1 or any(part.kind == "again" for part in parts)):
            return True
        return self.has_breaks and (max(_runs(self.root)) > 2 or any(part.kind == "again" for part in parts))

    @property
    def rounds_otherwise(self) -> bool:
        """Whether compiled training may round differently from eager training."""
        return self.adds_in_another_order or self.inner_backend == "inductor"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and batches; float64 if roundings differ, because cancellation amplifies them."""
        return torch.float64 if self.rounds_otherwise else torch.float32

    @property
    def tolerance(self) -> float:
        """Largest relative difference between eager and compiled training."""
        return 1e-9 if self.rounds_otherwise else 0.0


def walk(part: Part) -> Iterator[Part]:
    yield part
    for child in part.children:
        yield from walk(child)


def _runs(part: Part) -> Iterator[int]:
    """Yield how often each part runs, except for the modules that "again" runs."""
    yield part.times
    is_run_twice = part.kind == "heads" and len(part.children) == 1
    for child in part.children:
        yield from (part.times * times * (1 + is_run_twice) for times in _runs(child))


_FLAGS = {
    "frozen": st.sampled_from(["", "", "", "all", "vectors"]),
    "is_checkpointed": st.sampled_from([False, False, True]),
    "is_sharded": st.booleans(),
    "keeps": st.sampled_from([None, None, False, True]),
    "times": st.sampled_from([1, 1, 2]),
}
_LEAVES = st.builds(Part, st.sampled_from(LEAVES), number=st.integers(1, 7), **_FLAGS)


def _inner(parts: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    children = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.builds(Part, st.sampled_from(INNER), children, **_FLAGS)


def comparable(program: Program) -> Program:
    """Adapt a program so that eager and compiled results are comparable.

    With "stages" each part of the root must be sharded, because the root's own parameters are freed after the first
    backward. A program that rounds differently must not use 16 bits, because its differences would have no bound.
    """
    if "stages" in program.steps:
        parts = tuple(replace(part, is_sharded=True) for part in program.root.children)
        program = replace(program, root=replace(program.root, children=parts))
    return replace(program, in_bfloat16=False) if program.rounds_otherwise else program


def in_one_graph(part: Part) -> Part:
    """Replace parts with graph breaks by chains of their children."""
    kind = "chain" if part.kind in ("gate", "break") else part.kind
    return replace(part, kind=kind, children=tuple(map(in_one_graph, part.children)))


_TREES = st.recursive(_LEAVES, _inner, max_leaves=6)
_ROOTS = st.builds(
    Part,
    st.sampled_from(INNER),
    st.lists(_TREES, min_size=1, max_size=3).map(tuple),
    is_checkpointed=_FLAGS["is_checkpointed"],
    keeps=_FLAGS["keeps"],
)
PROGRAMS: st.SearchStrategy[Program] = st.builds(
    Program,
    _ROOTS,
    st.tuples(*[st.sampled_from(STEPS)] * 3),
    st.tuples(*[st.booleans()] * 3),
    in_bfloat16=st.sampled_from([False, False, True]),
    prefetches=st.booleans(),
    budget=st.sampled_from([None] * 3 + [("memory_budget", size) for size in (2**12, 2**13, 2**20)]),
).map(comparable)
