"""Collect the rows of the parity table while tests run, and write docs/parity.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.parity.check import Outcome, more_collectives

_HEAD = """\
# Parity with eager FSDP2

For users and contributors who ask how closely a compiled step follows eager FSDP2. `make parity` writes this page
({torch}, gloo, CPU). Each row trains a model three times: with torch's `fully_shard`, with ours run eagerly, and
with ours compiled with `fullgraph=True`; `tests/helpers/parity/features.py` defines the rows. Losses and gradients of
every step are compared, and at the end parameters, buffers, optimizer state and state dicts. If training without
sharding computes equal values, the difference to it is at most 1e-5, except in 16 bits. Rows that combine features run
with aot_eager only.

* aot_eager, inductor: largest relative difference to eager FSDP2 with this inner backend; 0 is bit by bit.
* graphs: number compiled in all; after "+", compiled after the first step.
* calls: collectives of one compiled step; "of" the eager step's number, if it is larger.
* sent: bytes of these collectives, compiled / eager.
* peak: bytes that a step allocates, compiled / eager, with aot_eager and with inductor. These models have a few
  thousand parameters; aot_eager keeps the copies that passes remove.

| row | ranks | aot_eager | inductor | graphs | calls | sent | peak |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

_TAIL = """
## More tests

Files in `tests/` that compare with eager FSDP2, bit by bit with aot_eager:

| training | file |
| --- | --- |
| schedules of `torch.distributed.pipelining`, with tensor parallelism | `backend/test_pipeline_stages.py` |
| DTensors as inputs and outputs, `dp_mesh_dims` | `runtime/test_dtensor_activations.py` |
| separately called or compiled modules, several roots in one graph | `runtime/test_submodules.py` |
| outputs that the loss does not use | `backend/test_undefined_gradients.py` |
| gradients with respect to inputs, a second backward through a kept graph | `backend/test_input_gradients.py` |
| pending unshards, shared communication contexts | `runtime/test_user_gathers.py` |
| a parameter's `grad_dtype`, `finalize_backward()`, since torch 2.15 | `runtime/test_gradient_dtypes.py` |
| torchao's float8 all-gather | `runtime/test_float8_gathers.py` |
| routed experts, context parallelism, lengths, Muon, averages, adapters | `parity/test_training_styles.py` |

## Differences by rule

* A checkpointed block that writes a buffer: eager FSDP2 writes twice, because it runs the block twice; a compiled step
  writes once.
* The gradients of a weight that the forward reads twice and the loss once more are added in a different order, which
  may round differently.
* A backward called inside autocast casts nothing: its ops have the dtypes of the forward.
* In compiled code a parameter is a plain unsharded tensor everywhere, so `isinstance(parameter, DTensor)` is False. Ask
  `isinstance(module, FSDPModule)` instead.

## Refused

These raise an error before any collective, with the module's name. The model trains eagerly.

| refused | because |
| --- | --- |
| `set_symm_mem_for_comm` | a graph cannot allocate symmetric memory |
| a pending `unshard(async_op=True)` in `torch.compile(model)` | a graph cannot wait; `model.compile()` does |
| SPMD types of a parameter, since torch 2.15 | no traced form yet |
| an all-gather extension that returns a tensor subclass not made of plain tensors | graphs fill plain tensors |
| torchao's `precompute_float8_dynamic_scale_for_fsdp` | its `__tensor_unflatten__` loses the scales |
| a zero-bubble schedule on a stage compiled in parts, or with tensor parallelism | it does not find the parameters |
| an in-place write of a gathered parameter in the forward, `max_norm` of an embedding | the write would be lost |
| an LSTM, GRU or RNN without a `fully_shard` of its own | eager code would read its sharded weights |
| `torch.cond`, loops, `flex_attention`, with torch 2.13 and 2.14 | Dynamo loses the state that changes after them |
| hooks on sharded parameters, offloading, in [CUDA graphs](options.md#cuda-graphs) | they need the host |
| `create_graph=True`, `torch.autograd.grad` with respect to sharded parameters | see `BackwardError` |
"""

_BACKENDS = ("aot_eager", "inductor")


@dataclass
class Row:
    """Figures of a row.

    Attributes:
        shared: Ranks, graphs, calls and sent bytes, of the backend that ran last.
        differences: Largest relative difference to eager FSDP2, by inner backend.
        peaks: Peak of a compiled step over that of an eager step, by inner backend.
    """

    shared: tuple[str, str, str, str] = ("", "", "", "")
    differences: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, str] = field(default_factory=dict)

    def render(self, name: str) -> str:
        ranks, *counts = self.shared
        differences = [self.differences.get(backend, "") for backend in _BACKENDS]
        peaks = ", ".join(self.peaks[backend] for backend in _BACKENDS if backend in self.peaks)
        return f"| {' | '.join((name, ranks, *differences, *counts, peaks))} |\n"

    @classmethod
    def parse(cls, line: str) -> tuple[str, Row]:
        name, ranks, *differences, graphs, calls, sent, peak = (cell.strip() for cell in line.split("|")[1:-1])
        ran = {backend: text for backend, text in zip(_BACKENDS, differences, strict=True) if text}
        return name, cls((ranks, graphs, calls, sent), ran, dict(zip(ran, peak.split(", "), strict=True)))


@dataclass
class ParityTable:
    """Rows of the parity table, in the order of their tests."""

    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, row: str, inner_backend: str, world_size: int, outcomes: Sequence[Outcome]) -> None:
        """Add a row: the worst difference of all ranks, rank 0's remaining figures."""
        first = outcomes[0]
        compiled, eager = first.collectives
        later = first.compiled_after_first_step
        calls = str(len(compiled)) if len(compiled) == len(eager) else f"{len(compiled)} of {len(eager)}"
        if any(more_collectives(*outcome.collectives) for outcome in outcomes):
            calls += " (others)"
        found = self.rows.setdefault(row, Row())
        found.shared = (
            str(world_size),
            f"{len(first.directions)} + {later}" if later else str(len(first.directions)),
            calls,
            _ratio(sum(each.bytes for each in compiled), sum(each.bytes for each in eager)),
        )
        found.differences[inner_backend] = f"{max(outcome.worst for outcome in outcomes):.1e}".replace("0.0e+00", "0")
        found.peaks[inner_backend] = _ratio(*first.peak_bytes)

    def write(self, path: Path, torch_version: str) -> None:
        """Write the file; keep the figures of rows and backends that this run does not have."""
        rows = _read(path)
        for name, new in self.rows.items():
            old = rows.setdefault(name, Row())
            rows[name] = Row(new.shared, {**old.differences, **new.differences}, {**old.peaks, **new.peaks})
        lines = [row.render(name) for name, row in rows.items()]
        path.write_text(_HEAD.format(torch=f"torch {torch_version}") + "".join(lines) + _TAIL)


def _ratio(compiled: float, eager: float) -> str:
    return "1" if compiled == eager else f"{compiled / eager:.2f}"


def _read(path: Path) -> dict[str, Row]:
    """Read the rows that `ParityTable.write` wrote; none without a file."""
    text = path.read_text() if path.exists() else ""
    _, _, table = text.partition("| --- |")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    return dict(Row.parse(line) for line in lines)
