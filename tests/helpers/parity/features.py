"""The features of FSDP2 with a row in the parity table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compile_fsdp.torch_compat.fsdp import FSDPMeshInfo
from helpers.models.reference import Case
from helpers.models.tensor_subclasses import Float8Weight, Int8RowsWeight, Int8Weight, use
from helpers.parity import steps
from helpers.parity.check import Feature
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type

BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def always(**arguments: Any) -> Callable[[DeviceMesh], dict[str, Any]]:
    return lambda mesh: arguments


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def tensor_parallel(case: Case, mesh: DeviceMesh, use_local_output: bool = True) -> None:
    for block in case.blocks:
        plan = {"up": ColwiseParallel(use_local_output=use_local_output), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)


def _expert_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    halves = shared_mesh(mesh.device_type, (2, mesh.size() // 2), ("outer", "inner"))
    experts = FSDPMeshInfo(halves["inner"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(None, experts) if parameter.ndim == 3 else None

    return {"shard_placement_fn": place}


def _parallelize_experts(case: Case, mesh: DeviceMesh) -> None:
    case.model.parallelize(case.model, tp_mesh=None, use_seq_parallel=False, ep_mesh=mesh["ep"])


def _shard_experts(case: Case, fully_shard: Any, mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    """Shard the experts over the mesh left by expert parallelism, the rest over all ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    dense_mesh = shared_mesh(mesh.device_type, (dist.get_world_size(),), ("dp",))
    dense, sparse = (FSDPMeshInfo(each, shard_mesh_dim=0) for each in (dense_mesh, mesh))
    for block in case.blocks:
        experts = {p for p in block.parameters() if p.ndim == 3} if isinstance(block, nn.Module) else set()

        def place(parameter: nn.Parameter, experts: set[nn.Parameter] = experts) -> Any:
            return ShardPlacementResult(Shard(0), sparse if parameter in experts else dense)

        fully_shard(block, mesh=dense_mesh, **({"shard_placement_fn": place} if experts else {}))
    fully_shard(case.model, mesh=dense_mesh)


def _each(setting: str, *arguments: Any) -> Callable[[Case], None]:
    """Return a function that calls a setter of every sharded module."""

    def configure(case: Case) -> None:
        for module in (*case.blocks, case.model):
            getattr(module, setting)(*arguments)

    return configure


def _output_in_fp64(case: Case, fully_shard: Any, mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    for block in case.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(case.model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))


def _prefetch(case: Case) -> None:
    first, second, third = case.blocks[:3]
    case.model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])


def _freeze(case: Case, step: int) -> None:
    case.blocks[0].requires_grad_(step % 4 not in (1, 2))


def _divide_later(case: Case, step: int) -> None:
    if step >= 1:
        _each("set_gradient_divide_factor", min(3.0 + step, 5.0))(case)
        _each("set_force_sum_reduction_for_comms", True)(case)


def _with_ends(case: Case) -> list[Any]:
    return [*case.blocks, [case.model.norm, case.model.embedding, case.model.head]]


def _gather_as(weight: type[Any], case: str = "mlp") -> Feature:
    """All weights as tensor subclasses with their own all-gather."""
    return Feature(case=case, prepare=lambda case: use([case.model], weight), has_reference=False)


def _materialise(case: Case) -> None:
    case.model.to_empty(device=device_type())
    torch.manual_seed(0)
    for parameter in case.model.parameters():
        nn.init.normal_(parameter, std=0.3)


def _load(case: Case, step: int) -> None:
    state = {name: value.clone() * 0.9 for name, value in case.model.state_dict().items()}
    case.model.load_state_dict(state, assign=step == 2)


def _optimizer_in_backward(case: Case) -> None:
    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.02)
        parameter.grad = None

    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def _adam_in_backward(case: Case) -> None:
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=1e-3, foreach=False) for parameter in case.model.parameters()
    }

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)


def _adam(**options: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


# Names since torch 2.12, and before.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Loud(AllGather, ReduceScatter):
    """A custom communicator that calls plain collectives."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any = None, async_op: Any = False
    ) -> Any:
        if op is None:
            return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _custom_communication(case: Case) -> None:
    _each("set_custom_all_gather", _Loud())(case)
    _each("set_custom_reduce_scatter", _Loud())(case)


def _separate_reduce_scatter(case: Case, step: int) -> None:
    case.model.set_separate_reduce_scatter_group(step > 0)  # type: ignore[operator]


def _shard_below_wrapper(case: Case, fully_shard: Any, mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    for module in (*case.blocks, case.model.module):
        fully_shard(module, mesh=mesh, **arguments)


def _halve(reduced: torch.Tensor) -> None:
    reduced.mul_(0.5)


# One graph per setting: the first backward, a backward that accumulates, the last backward; two forwards.
ACCUMULATED = ("forward", "backward", "backward", "backward")
TWICE = ("forward", "forward", "backward", "backward")

FEATURES: dict[str, Feature] = {
    "even": Feature(),
    "uneven": Feature(case="uneven"),
    "odd sizes": Feature(case="odd_sizes"),
    "columns": Feature(arguments=always(shard_placement_fn=columns)),
    # No reference, because the experts' mesh does not average over all ranks.
    "meshes by parameter": Feature(case="mixture", arguments=_expert_mesh, has_reference=False),
    "tensor parallel": Feature(mesh={"dp": 2, "tp": 0}, data_mesh=("dp",), parallelize=tensor_parallel),
    "tensor parallel, uneven": Feature(
        case="mlp_of_five",
        mesh={"dp": 2, "tp": 0},
        data_mesh=("dp",),
        parallelize=partial(tensor_parallel, use_local_output=False),
    ),
    "expert parallel": Feature(
        case="expert_transformer",
        mesh={"efsdp": 2, "ep": 0},
        data_mesh=("efsdp",),
        parallelize=_parallelize_experts,
        shard=_shard_experts,
        step=steps.square_of_logits,
        has_reference=False,
    ),
    "views of views": Feature(case="batched_products"),
    "scale in the loss": Feature(case="scaled_outside", step=steps.scale_the_loss),
    "penalty in the loss": Feature(step=steps.penalize("out.weight", "inp.bias")),
    "penalty in the loss, kept": Feature(
        arguments=always(reshard_after_forward=False), step=steps.penalize("layers.0.up.weight", "out.weight")
    ),
    "penalty between forwards": Feature(step=steps.penalize_first, graphs=TWICE),
    "hsdp": Feature(mesh={"replicate": 2, "shard": 0}),
    "hsdp, one shard": Feature(mesh={"replicate": 0, "shard": 1}),
    "hsdp, all-reduce later": Feature(
        mesh={"replicate": 2, "shard": 0},
        step=steps.only_for_the_last("set_requires_all_reduce"),
        graphs=("forward", *["backward"] * 2),
    ),
    "reshard": Feature(arguments=always(reshard_after_forward=True)),
    "keep": Feature(arguments=always(reshard_after_forward=False)),
    "reshard to 2": Feature(arguments=always(reshard_after_forward=2)),
    "reshard set later": Feature(configure=_each("set_reshard_after_forward", False)),
    "keep after backward": Feature(
        step=steps.accumulate_unsharded, graphs=("forward", "backward", "forward", "backward")
    ),
    "no unshard in backward": Feature(
        case="embedded", configure=lambda case: case.model.embedding.set_unshard_in_backward(False)
    ),
    "bf16, reduced in fp32": Feature(arguments=always(mp_policy=BF16_FP32), low_precision=True),
    "fp16": Feature(arguments=always(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)), low_precision=True),
    "output in fp64": Feature(shard=_output_in_fp64),
    "inputs not cast": Feature(
        arguments=always(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64, cast_forward_inputs=False))
    ),
    "divide by 3, sums only": Feature(
        configure=lambda case: (
            _each("set_gradient_divide_factor", 3.0)(case),
            _each("set_force_sum_reduction_for_comms", True)(case),
        ),
        has_reference=False,
    ),
    "divisor set between": Feature(
        before_step=_divide_later, graphs=("forward", *["backward"] * 3), later_graphs=2, has_reference=False
    ),
    "buffers": Feature(case="batch_norm", has_reference=False),
    "convolutions": Feature(case="convolutions"),
    "cpu offload": Feature(arguments=always(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "shared parameters": Feature(case="tied_ends"),
    "group of modules": Feature(case="tied_ends", blocks=_with_ends),
    "group of modules, in part": Feature(case="tied_ends_in_part", blocks=_with_ends),
    "frozen": Feature(case="frozen"),
    "frozen layers": Feature(case="frozen_layers"),
    "frozen layers first": Feature(case="frozen_first"),
    "frozen layers, checkpointed": Feature(case="frozen_checkpoint"),
    "frozen between": Feature(
        before_step=_freeze, graphs=("forward", "backward") * 2, later_graphs=2, has_reference=False
    ),
    "lora": Feature(case="lora"),
    "unused": Feature(case="unused_parameter"),
    "unused, reduced": Feature(
        case="unused_parameter", configure=_each("set_reduce_scatter_unused_params", True), has_reference=False
    ),
    "accumulate": Feature(step=steps.accumulate, graphs=ACCUMULATED),
    "accumulate in fp32": Feature(
        step=steps.accumulate,
        graphs=("forward", "backward", "backward"),  # torch itself keeps gradients of microbatches in fp32
        arguments=always(mp_policy=BF16_FP32),
        low_precision=True,
    ),
    "accumulate sharded": Feature(step=steps.accumulate_sharded),
    "not the last backward": Feature(step=steps.only_for_the_last("set_is_last_backward")),
    "two forwards": Feature(step=steps.two_forwards, graphs=TWICE),
    "two forwards, two backwards": Feature(step=steps.two_forwards_two_backwards, graphs=TWICE),
    "no_grad forward": Feature(step=steps.with_no_grad, graphs=("forward", "forward", "backward")),
    "used three times": Feature(case="used_three_times"),
    "checkpoint inside": Feature(case="checkpoint_inside"),
    "checkpoint in nested modules": Feature(case="nested_checkpoint"),
    "checkpoint outside": Feature(case="checkpoint_outside"),
    "selective checkpoint": Feature(case="selective"),
    "float8 gather": Feature(prepare=lambda case: use(case.blocks, Float8Weight), has_reference=False),
    "int8 gather": _gather_as(Int8Weight),
    "int8 gather, uneven": _gather_as(Int8Weight, "uneven"),
    "subclass gather": _gather_as(Int8RowsWeight),
    "subclass gather, uneven": _gather_as(Int8RowsWeight, "uneven"),
    "subclass gather, frozen layers": _gather_as(Int8RowsWeight, "frozen_layers"),
    "subclass gather, checkpointed": _gather_as(Int8RowsWeight, "checkpoint_inside"),
    "from meta": Feature(on_meta=True, configure=_materialise, has_reference=False),
    "state dicts loaded": Feature(before_step=_load, has_reference=False),
    "moved between steps": Feature(before_step=lambda case, step: case.model.to(device_type()), has_reference=False),
    "moved to bf16": Feature(
        configure=lambda case: case.model.to(torch.bfloat16),
        arguments=always(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        low_precision=True,
    ),
    "clipped": Feature(update=steps.clip_and_update, has_reference=False),
    "averaged": Feature(update=steps.average_and_update, has_reference=False),
    "grad scaler": Feature(step=steps.scaled, update=steps.scale_and_update, has_reference=False),
    "optimizer in backward": Feature(configure=_optimizer_in_backward, has_reference=False),
    "adam in backward": Feature(configure=_adam_in_backward, has_reference=False),
    "adam, foreach": Feature(optimizer=_adam(foreach=True)),
    "adam, fused": Feature(optimizer=_adam(fused=True)),
    "custom communication": Feature(configure=_custom_communication),
    "all-reduce hook": Feature(configure=_each("set_all_reduce_hook", _halve), has_reference=False),
    "hsdp and tensor parallel": Feature(
        mesh={"replicate": 2, "shard": 1, "tp": 0}, data_mesh=("replicate", "shard"), parallelize=tensor_parallel
    ),
    "replicated": Feature(sharding=replicate),
    "prefetch": Feature(case="lora", configure=_prefetch),
    "reduce-scatter group of its own": Feature(
        before_step=_separate_reduce_scatter,
        graphs=("forward", "backward", "backward"),
        later_graphs=1,
        has_reference=False,
    ),
    "late forward": Feature(case="late_forward"),
    "late backward": Feature(case="late_backward"),
    "below a wrapper": Feature(case="wrapped", shard=_shard_below_wrapper),
}

# First torch release that supports the row.
SINCE = {
    "expert parallel": "2.13",
    "meshes by parameter": "2.12",
    "reduce-scatter group of its own": "2.13",
    "unused, reduced": "2.13",
}

# Rows whose meshes need four ranks.
FOUR_RANKS = {
    "expert parallel", "tensor parallel", "tensor parallel, uneven", "meshes by parameter", "reshard to 2",
    "hsdp", "hsdp, one shard", "hsdp, all-reduce later", "hsdp and tensor parallel",
}  # fmt: skip
