"""Collect the rows of the parity table while tests run, and write docs/parity.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.parity.check import Outcome, more_collectives

_HEAD = """\
# Parity with eager FSDP2

Written by `make parity` from a test run ({torch}, gloo, CPU); `tests/helpers/parity/features.py`
says what each row sets. In every row the same model is trained without sharding (where that computes the same), by
torch's eager `fully_shard`, by ours run eagerly, and by ours compiled with `fullgraph=True`. Compared: the losses and
gradients of every step; at the end the parameters, buffers, optimizer state and the state_dict's keys, placements and
dtypes; the collectives of the last step, as the backend executed them.

* difference: the largest relative one to eager FSDP2; 0 is bit by bit.
* error: the largest relative difference to training without sharding in float32, compiled and eager. Empty where
  training without sharding computes something else; unless it is in 16 bits, it was checked to be at most 1e-5.
* graphs: compiled in all, and after the first step.
* collectives, sent: of one compiled step, and of the eager one; never one that the eager step does not issue.
* peak: most bytes allocated in a step over what was there before, compiled and eager. These models have a few
  thousand parameters, so the figure shows what lives together, not what a real model saves. `aot_eager` runs the
  graphs op by op and keeps what no pass has taken out.
"""

_TAIL = """
## Further ways to train

Each is held against eager FSDP2 by a test of its own in `tests/distributed/`, bit by bit with `aot_eager`:

| what | test |
| --- | --- |
| all schedules of `torch.distributed.pipelining`, with tensor parallelism too | `test_pipeline.py` |
| DTensors as inputs and outputs, experts on a mesh of their own, `dp_mesh_dims` | `test_dtensor_activations.py` |
| modules called and compiled by themselves, several roots in one graph | `test_submodules.py` |
| outputs that the loss does not use | `test_undefined_gradients.py` |
| gradients by inputs, a graph that is kept for a second backward | `test_input_gradients.py` |
| pending unshards, shared communication contexts | `test_user_gathers.py` |
| a parameter's own `grad_dtype`, `finalize_backward()`, since torch 2.15 | `test_gradient_dtypes.py` |
| torchao's float8 all-gather: kept, frozen, checkpointed, cut, tensor parallel | `test_float8_gathers.py` |
| routed and grouped experts, context parallelism, lengths, Muon, averages, adapters | `test_training_styles.py` |

## Differences by rule

* A checkpointed block that writes a buffer: eager FSDP2 runs the block twice and writes twice; a compiled step writes
  once, in the forward.
* `x + block(x)` with the addition outside of the sharded block: the two gradients of `x` are added in another order and
  may differ by a rounding, 3e-8 in float32. So are the gradients of a weight that the forward reads twice and the loss
  once more.
* In compiled code a parameter of a sharded module is a plain unsharded tensor everywhere. Eager FSDP2 shows code
  outside of the module the sharded DTensor, so `hasattr(parameter, "full_tensor")` and `isinstance(parameter, DTensor)`
  are True there and False in compiled code. Ask `isinstance(module, FSDPModule)` instead.

## Refused

Before any collective, with the module's name; the same model trains eagerly.

| what | why |
| --- | --- |
| `set_symm_mem_for_comm` | a graph cannot allocate symmetric memory |
| a pending `unshard(async_op=True)` in `torch.compile(model)` | a graph cannot wait; `model.compile()` does |
| SPMD types of a parameter, since torch 2.15 | no traced form yet |
| an all-gather extension that returns a tensor subclass not made of plain tensors | graphs fill plain tensors |
| torchao's `precompute_float8_dynamic_scale_for_fsdp` | its `__tensor_unflatten__` loses the scales |
| a zero-bubble schedule on a stage compiled in parts, or with tensor parallelism | it does not find the parameters |
| an in-place write of a gathered parameter in the forward, `max_norm` of an embedding | the write would be lost |
| `create_graph=True`, `torch.autograd.grad` by sharded parameters | see `BackwardError` |
"""


@dataclass
class ParityTable:
    """Rows of the parity table, in the order of their tests."""

    rows: dict[tuple[str, str], str] = field(default_factory=dict)  # (inner backend, row): line

    def add(self, row: str, inner_backend: str, world_size: int, outcomes: Sequence[Outcome]) -> None:
        """Add a row: all ranks' worst difference and error, rank 0's remaining figures."""
        first = outcomes[0]
        compiled, eager = first.collectives
        passed = not any(more_collectives(*outcome.collectives) for outcome in outcomes)
        cells = (
            row,
            str(world_size),
            f"{max(outcome.worst for outcome in outcomes):.1e}".replace("0.0e+00", "0"),
            " / ".join(f"{max(each):.1e}" for each in zip(*(o.unsharded for o in outcomes), strict=True))
            if any(first.unsharded)
            else "",
            f"{len(first.directions)} + {first.compiled_after_first_step}"
            if first.compiled_after_first_step
            else str(len(first.directions)),
            f"{len(compiled)} / {len(eager)}" + ("" if passed else " (others)"),
            f"{sum(each.bytes for each in compiled)} / {sum(each.bytes for each in eager)}",
            f"{first.peak_bytes[0]} / {first.peak_bytes[1]} ({first.peak_bytes[0] / first.peak_bytes[1]:.2f}x)",
        )
        self.rows[inner_backend, row] = f"| {' | '.join(cells)} |"

    def write(self, path: Path, torch_version: str) -> None:
        """Write the file; keep its rows that this run does not have."""
        rows = {**_read(path), **self.rows}
        parts = [_HEAD.format(torch=f"torch {torch_version}")]
        for backend in dict.fromkeys(backend for backend, _ in rows):
            parts.append(
                f"\n## {backend}\n\n"
                "| row | ranks | difference | error | graphs | collectives | sent, bytes | peak, bytes |\n"
                "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
            )
            parts += [f"{line}\n" for (each, _), line in rows.items() if each == backend]
        path.write_text("".join(parts) + _TAIL)


def _read(path: Path) -> dict[tuple[str, str], str]:
    """Read the rows that `ParityTable.write` wrote; none without a file."""
    rows = {}
    backend = ""
    figures = path.read_text().split("\n## Further", 1)[0] if path.exists() else ""
    for line in figures.splitlines():
        if line.startswith("## "):
            backend = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| row ", "| --- ")):
            rows[backend, line.split("|")[1].strip()] = line
    return rows
