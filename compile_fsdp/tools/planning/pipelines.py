"""Pipeline parallelism: the place of a stage, its order of microbatches, and its part of a model.

[Note: 1F1B]
The schedule is 1F1B, one forward and one backward in turns: PipeDream-Flush, as in Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (SC 2021), and torch's `Schedule1F1B`. Stage s of
P begins with as many forwards as fit before its first backward: it holds the activations of min(P - s, M) of M
microbatches. Under FSDP2, torch's stages add up unsharded gradients, in the dtype of the reduction, and reduce them
once, after the last backward. What a stage receives has a buffer for each microbatch, and the gradients of these inputs
stay until the step is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compile_fsdp.errors import EstimateError
from compile_fsdp.wrap import ModuleWrapPolicy

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Place:
    """A stage of a pipeline. The default is a model as a whole, with one batch.

    Attributes:
        stage: Number of the stage, from 0.
        stages: How many there are.
        microbatches: Of a step.
    """

    stage: int = 0
    stages: int = 1
    microbatches: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations the stage holds at a time, at most. See [Note: 1F1B]."""
        return min(self.stages - self.stage, self.microbatches)

    @property
    def traced(self) -> int:
        """Microbatches that show all that happens: of more, one backward and one forward repeat."""
        return min(self.microbatches, self.in_flight + 1)

    def order(self) -> Iterator[bool]:
        """Whether each run of a traced microbatch is a forward; a backward is that of the oldest one in flight."""
        yield from [True] * self.in_flight
        yield from [False, True] * (self.traced - self.in_flight)
        yield from [False] * self.in_flight


WHOLE = Place()


def distinct_places(stages: int, microbatches: int) -> list[Place]:
    """The first, the second and the last stage: the others hold no more than the second."""
    return [Place(stage, stages, microbatches) for stage in sorted({0, min(1, stages - 1), stages - 1})]


def layers_of(place: Place, layers: int) -> range:
    """The layers of a stage. Where they are not equally many, stages between the first and the last have one more.

    Raises:
        EstimateError: there are fewer layers than stages.
    """
    least, more = divmod(layers, place.stages)
    if not least:
        raise EstimateError(f"expected a layer for each stage, got {layers} layers for {place.stages}; lower --pp")
    inner = [*range(1, place.stages - 1), 0, place.stages - 1][:more]
    counts = [least + (stage in inner) for stage in range(place.stages)]
    start = sum(counts[: place.stage])
    return range(start, start + counts[place.stage])


class Stage(nn.Module):
    """A stage of a language model of transformers.

    Args:
        model: The whole model, which loses the parts of other stages.
        place: Of the stage.

    Attributes:
        policy: Makes a group of each layer, also of a single one.
    Raises:
        EstimateError: the architecture is not one that is known here, or its first and last part share a parameter.
    """

    def __init__(self, model: Any, place: Place) -> None:
        super().__init__()
        config = model.config
        if config.model_type not in ARCHITECTURES or config.tie_word_embeddings:
            raise EstimateError(
                f"expected one of {', '.join(ARCHITECTURES)} with a head of its own as a pipeline, got "
                f"{config.model_type!r} with tie_word_embeddings={config.tie_word_embeddings}; plan it without --pp"
            )
        base = model.model
        own = layers_of(place, len(base.layers))
        base.layers = nn.ModuleList(base.layers[i] for i in own)
        base.config.num_hidden_layers = len(own)
        if not place.is_first:
            base.embed_tokens = None
        if not place.is_last:
            base.norm, model.lm_head = nn.Identity(), None
        self.policy = ModuleWrapPolicy({type(base.layers[0])})
        self.is_last = place.is_last
        self.model = model

    def forward(self, **batch: Any) -> Any:
        """What the next stage gets, (B, S, D); of the last stage an output with the loss."""
        return self.model(**batch) if self.is_last else self.model.model(**batch).last_hidden_state


def stage_batch(batch: dict[str, Tensor], place: Place, hidden: Tensor) -> dict[str, Tensor]:
    """Of the batch of a whole model, the arguments of a stage, and `output_gradient`.

    Args:
        batch: Arguments of the whole model.
        place: Of the stage.
        hidden: What one stage sends to the next, on the meta device.
    """
    batch = dict(batch)
    if not place.is_first:
        del batch["input_ids"]
        batch["inputs_embeds"] = torch.empty_like(hidden)
    if not place.is_last:
        del batch["labels"]
        batch["output_gradient"] = torch.empty_like(hidden)
    return batch
