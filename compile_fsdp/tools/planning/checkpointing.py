"""Activation checkpointing of layers: which outputs the forward saves, and which the backward computes again."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.tracing import Batch, trace_step
from compile_fsdp.torch_compat.dispatch import OpOverload, TorchDispatchMode, attention_ops
from compile_fsdp.wrap import Plan

_MATMUL = torch.ops.aten.mm.default
# Attention, and the reductions of tensor parallelism.
ALWAYS_SAVED = attention_ops | {torch.ops._c10d_functional.reduce_scatter_tensor.default}


class Saved(enum.Enum):
    """What the forward of a checkpointed layer saves beside the layer's inputs."""

    NOTHING = "full"
    """All of the layer is computed again."""
    SOME_MATMULS = "selective"
    """Attention, reduce-scatters of tensor parallelism, and every second matrix product: the first, the third and so
    on. These are what torchtitan's `op` mode saves."""
    MATMULS = "matmuls"
    """The same with every matrix product."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """How the layers of a model are checkpointed.

    Attributes:
        saved: What the forward saves of a checkpointed layer.
        every: Of so many layers, the last one is checkpointed; 1 for all layers.
        compiled: Whether the layers are compiled, each by itself: what the backward does not read is then not saved.
    """

    saved: Saved = Saved.NOTHING
    every: int = 1
    compiled: bool = False

    @classmethod
    def parse(cls, text: str) -> Checkpointing:
        """From `full`, `selective`, `matmuls`, or the number of layers of which the last one is checkpointed.

        Raises:
            ValueError: the text is none of these.
        """
        if text.isdigit() and int(text) > 0:
            return cls(every=int(text))
        return cls(Saved(text))

    def apply(self, model: nn.Module, batch: Batch) -> None:
        """Checkpoint the layers of a model of transformers, which is in training mode.

        Args:
            model: On any device, meta included.
            batch: Keyword arguments of a small forward, which is traced to learn what the backward of a layer reads.
        Raises:
            EstimateError: there are fewer layers than `every`.
            ValueError: the model does not support checkpointing.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        kwargs: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        contexts = SelectiveContexts(every_second=self.saved is Saved.SOME_MATMULS)
        if self.saved is not Saved.NOTHING:
            kwargs["context_fn"] = contexts.make
        # transformers 5.23 has a new name for the same method.
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(kwargs)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if len(layers) < self.every:
            raise EstimateError(f"expected at least {self.every} layers, got {len(layers)}; checkpoint more of them")
        for number, layer in enumerate(layers, start=1):
            layer.gradient_checkpointing = number % self.every == 0
        if self.compiled and self.saved is not Saved.NOTHING:
            trace_step(Plan(model, ()), batch)
            contexts.saves_unread = False


class SelectiveContexts:
    """Makes the contexts in which a layer's forward runs: once to save outputs, and once more in the backward.

    [Note: Saved and not read]
    In eager mode the choice is made when an op runs, and what is chosen is saved whether the backward reads it or not:
    the last product of a layer, which is only added to the residual stream, is not read. The second run of a layer
    stops as soon as the backward has all that it needs; an op that it does not reach is such a one, and a compiled
    layer does not save it. All layers count as one here: what one of them reaches, the others save.

    Args:
        every_second: Whether every second matrix product is computed again.

    Attributes:
        saves_unread: Whether an output is saved even if no backward so far has reached its op.
    """

    def __init__(self, every_second: bool) -> None:
        self.saves_unread = True
        self._every_second = every_second
        self._reached: set[tuple[OpOverload, int]] = set()  # by op, and its number among the same ops of the layer

    def make(self) -> Any:
        numbers: Counter[OpOverload] = Counter()

        def choose(context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is not _MATMUL and op not in ALWAYS_SAVED:
                return CheckpointPolicy.PREFER_RECOMPUTE
            numbers[op] += 1
            is_chosen = op in ALWAYS_SAVED or not self._every_second or numbers[op] % 2 == 1
            if is_chosen and (self.saves_unread or (op, numbers[op]) in self._reached):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        first, second = create_selective_checkpoint_contexts(choose)
        return first, _Noted(second, self._reached)


class _Noted(TorchDispatchMode):
    """Enters another mode, and notes which ops run in it: each with its number among the same ops."""

    def __init__(self, mode: TorchDispatchMode, noted: set[tuple[OpOverload, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._noted = mode, noted
        self._numbers: Counter[OpOverload] = Counter()

    def __enter__(self) -> _Noted:
        self._mode.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._mode.__exit__(*error)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._numbers[op] += 1
        self._noted.add((op, self._numbers[op]))
        return op(*args, **(kwargs or {}))
