"""Rules of `check`: functions that turn observations of a script into findings with remedies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from compile_fsdp.backend.captured_backward import FALLS_BACK
from compile_fsdp.passes.text import format_bytes, list_names
from compile_fsdp.tools.check.findings import Finding, Level
from compile_fsdp.tools.check.models import ShardedGroup, ShardedModel
from compile_fsdp.tools.explain.capture import Capture, GraphBreak, is_library, last_user_place, split_reason
from compile_fsdp.tools.explain.names import add_model
from compile_fsdp.wrap.tree import ROOT

COMPILE = '.compile(backend="compile_fsdp", fullgraph=True)'
OPEN = ("open at return", "open at start")  # reasons if a parameter stays unsharded from forward to backward


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of a script's run."""

    captured: Capture
    models: tuple[ShardedModel, ...]
    steps: int  # of the optimizer with the most steps
    failure: Finding | None = None  # for the error that has ended the script, if any

    @property
    def breaks(self) -> list[GraphBreak]:
        """Graph breaks outside of torch's optimizers, which break the graph themselves if their steps are compiled."""
        return [each for each in self.captured.breaks if "/torch/optim/" not in each.place.filename.replace("\\", "/")]


def find(seen: Seen) -> tuple[Finding, ...]:
    """Run all rules; return the findings by level: breaks, costs, notes."""
    found = [] if seen.failure is None else [seen.failure]
    for rule in (_breaks, _not_whole, _kept, _recompiles, _settings, _notes):
        found += rule(seen)
    return tuple(sorted(found, key=lambda finding: list(Level).index(finding.level)))


def _breaks(seen: Seen) -> Iterator[Finding]:
    """Graph breaks of the forward, merged by line, and backwards that are not compiled."""
    by_place: dict[tuple[str, int], list[GraphBreak]] = {}
    for each in seen.breaks:
        by_place.setdefault((each.place.filename, each.place.line), []).append(each)
    failed_at = None if seen.failure is None else seen.failure.place
    for found in by_place.values():
        if found[0].place == failed_at:
            continue  # under fullgraph=True this break has ended the script, and is the failure
        reasons = dict.fromkeys(describe_reason(each.reason, each.explanation) for each in found)
        hints = tuple(dict.fromkeys(hint for each in found for hint in each.hints))
        yield Finding(Level.BREAKS, "graph-break", " ".join(reasons), break_remedy(hints), found[0].place)
    for note in dict.fromkeys(seen.captured.notes):
        if note.startswith(FALLS_BACK):
            reason, explanation, hints = split_reason(note.removeprefix(FALLS_BACK).partition("\n\n")[0])
            what = "The backward is not compiled but runs op by op, with all its parameters unsharded: "
            what += describe_reason(reason, explanation)
            remedies = ["Remove this construct from the hooks and autograd functions that the backward runs."]
            remedy = " ".join([*remedies, *_useful(hints)])
            yield Finding(Level.BREAKS, "eager-backward", what, remedy, last_user_place(note))


def describe_reason(reason: str, explanation: str) -> str:
    """Join Dynamo's reason and explanation into sentences, without a reason whose words the explanation repeats."""
    reason_words, words = (set(re.findall(r"\w{2,}", text.lower())) for text in (reason, explanation))
    reason = "" if reason_words <= words else reason
    joined = ". ".join(text.strip().rstrip(".") for text in (reason, explanation) if text) + "."
    return re.sub(r" at 0x[0-9a-f]+| \(reason: None\)", "", joined)


def break_remedy(hints: tuple[str, ...]) -> str:
    """Return Dynamo's useful hints, or a general remedy if there are none."""
    return " ".join(_useful(hints)) or "Write this line in tensor operations, or move it out of the model's forward."


def _useful(hints: tuple[str, ...]) -> list[str]:
    useful = (each for each in hints if "report an issue" not in each and "earlier graph break" not in each)
    return [f"{each.rstrip('.')}." for each in itertools.islice(useful, 2)]


def _not_whole(seen: Seen) -> Iterator[Finding]:
    if not seen.models and not any(seen.captured.traced.values()):
        what = "No sharded model was found, and none was compiled."
        remedy = "Shard with compile_fsdp.fully_shard and run a training step; keep the model until the script ends."
        yield Finding(Level.BREAKS, "no-sharded-model", what, remedy)
    has_break = bool(seen.breaks)
    falls_back = any(note.startswith(FALLS_BACK) for note in seen.captured.notes)
    for model in seen.models:
        if not model.is_traceable:
            what = f"{model.name} was sharded by torch's fully_shard, at whose hooks Dynamo breaks the graph."
            remedy = f"Shard with compile_fsdp.fully_shard, or call compile_fsdp.make_traceable(model), then {COMPILE}."
            yield Finding(Level.BREAKS, "not-traceable", what, remedy)
        if not model.is_captured:
            yield from _uncaptured_model(model, seen)
        elif (missing := tuple(group.name for group in model.groups if not group.is_captured)) and not has_break:
            what = f"{list_names(missing)} of {model.name} ran outside of the compiled forward graphs, or not at all."
            remedy = f"Call model{COMPILE} on the outermost sharded module, and call that module; leave modules that "
            remedy += "do not run unsharded."
            yield Finding(Level.BREAKS, "module-not-captured", what + _parts(model), remedy, names=missing)
        elif not model.is_whole and not has_break:
            what = f"{model.name} runs as {model.forward_graphs} forward graphs without a graph break.{_parts(model)}"
            remedy = f"Compile the outermost sharded module alone, with {COMPILE}, after sharding."
            yield Finding(Level.BREAKS, "several-graphs", what, remedy, names=model.compiled_parts)
        if model.is_captured and model.trains and seen.steps and not (model.backward_graphs or falls_back):
            what = f"The forward of {model.name} was compiled, and no backward through it."
            remedy = "Call loss.backward() on a loss that is computed from the output of the compiled model."
            yield Finding(Level.BREAKS, "no-backward-graph", what, remedy)


def _uncaptured_model(model: ShardedModel, seen: Seen) -> Iterator[Finding]:
    settings = model.settings
    if not model.has_run and any(other.is_captured for other in seen.models):
        what = f"A second sharded model, {model.name}, has not run: an average of weights, for example."
        yield Finding(Level.NOTE, "not-run", what, "Nothing is wrong with it if the script only uses its parameters.")
    elif settings is None:
        if seen.failure is None:  # else the error may have come before the compilation
            what = f"{model.name} is sharded and was never compiled.{_parts(model)}"
            remedy = f"Call model{COMPILE} on it after sharding."
            yield Finding(Level.BREAKS, "not-compiled", what, remedy, names=model.compiled_parts)
    elif settings.backend != "compile_fsdp":
        what = f'{model.name} is compiled by the backend "{settings.backend}", which knows nothing of FSDP2.'
        remedy = 'Compile with backend="compile_fsdp"; it hands its graphs to Inductor, or to its option inner_backend.'
        yield Finding(Level.BREAKS, "other-backend", what, remedy)
    elif seen.failure is None and model.is_traceable:
        what = f"{model.name} is compiled, and no compiled forward ran."
        remedy = "Call the module, and not its forward() or a module inside of it, in each training step."
        yield Finding(Level.BREAKS, "not-captured", what, remedy)


def _parts(model: ShardedModel) -> str:
    return f" Compiled by themselves: {list_names(model.compiled_parts)}." if model.compiled_parts else ""


def _kept(seen: Seen) -> Iterator[Finding]:
    """Parameters that stay unsharded for too long, or whose all-gather copies stay."""
    captured = [model for model in seen.models if model.is_captured]
    groups: dict[str, ShardedGroup] = {}
    for model in captured:
        name = model.name if len(seen.captured.models) > 1 else ""
        groups |= {add_model(name, fqn): group for group in model.groups for fqn in group.parameters}
        yield from _kept_by_settings(model)
    by_reason: dict[str, dict[str, None]] = {}
    for graph in seen.captured.graphs:
        for fqn, reason in graph.kept:
            group = groups.get(fqn)
            if reason not in OPEN or (group is not None and group.reshards):
                by_reason.setdefault(OPEN[0] if reason in OPEN else reason, {})[fqn] = None
    has_budget = any(report.decision is not None for report in seen.captured.reports)
    changes = any("post_forward_mesh_info" in each.reason for each in seen.captured.recompiles)
    for reason, fqns in by_reason.items():
        names = tuple(fqns)
        if reason in OPEN and (has_budget or seen.breaks or changes):
            why = "a graph break is in between" if seen.breaks else "reshard_after_forward was False in some forwards"
            why = "there was room for them in the memory_budget" if has_budget else why
            what = f"{list_names(names)} stay unsharded from one graph to the next: {why}."
            is_cost = bool(seen.breaks) and not has_budget
            remedy = "Remove the graph break." if is_cost else "Nothing is wrong with it."
            yield Finding(Level.COSTS if is_cost else Level.NOTE, "kept-unsharded", what, remedy, names=names)
        else:
            what = f"{list_names(names)} keep the copy of each all-gather in memory, because: {reason}."
            remedy = "Check how the forward uses these parameters. The copy is removed only if the owning module reads "
            remedy += "them and does nothing else with them (docs/passes.md)."
            yield Finding(Level.COSTS, "kept-window", what, remedy, names=names)


def _kept_by_settings(model: ShardedModel) -> Iterator[Finding]:
    if len(model.groups) == 1 and len(model.groups[0].parameters) > 1:
        size = format_bytes(model.groups[0].unsharded_bytes)
        what = f"All parameters of {model.name} are in one group: {size} are gathered before anything is computed."
        remedy = "Shard the repeated blocks first and then the model; compile_fsdp.wrap.auto_shard(model) finds them."
        yield Finding(Level.COSTS, "one-group", what, remedy, names=(model.groups[0].name,))
    # The backward would gather the last group of the forward again at once, so keeping this group costs nothing.
    kept = [group for group in model.groups if not (group.reshards or group.is_last or group.name == ROOT)]
    if kept:
        size = format_bytes(sum(group.unsharded_bytes for group in kept))
        what = f"{list_names(group.name for group in kept)} of {model.name} are sharded with "
        what += f"reshard_after_forward=False: {size} stay unsharded from the forward to the backward."
        remedy = "Leave reshard_after_forward out, or set the option memory_budget, which keeps parameters that fit."
        names = tuple(fqn for group in kept for fqn in group.parameters)
        yield Finding(Level.COSTS, "kept-unsharded", what, remedy, names=names)


# Guards that training loops fail on purpose.
_EXPECTED = {
    "grad_mode": "training and evaluation have separate graphs",
    "requires_grad mismatch": "training and evaluation have separate graphs",
    "reduce_grads": "a backward without reductions has a separate graph",
    "post_forward_mesh_info": "forwards with different settings of reshard_after_forward have separate graphs",
}


def _recompiles(seen: Seen) -> Iterator[Finding]:
    for each in seen.captured.recompiles:
        is_own = is_library(each.place.filename)
        if seen.breaks and (is_own or each.function.startswith("torch_dynamo_resume_in_")):
            continue  # a piece of the broken forward
        again = "again" if each.times == 1 else f"again {each.times} times"
        what = f"Dynamo compiled {each.function} {again}, because a guard of the earlier graph failed: {each.reason}"
        why = next((why for guard, why in _EXPECTED.items() if guard in each.reason.lower()), None)
        level = Level.COSTS if why is None else Level.NOTE
        remedy = _guard_remedy(each.reason) if why is None else f"No change is needed: {why}."
        yield Finding(level, "recompiled", what, remedy, None if is_own else each.place)


def _guard_remedy(reason: str) -> str:
    if "size mismatch" in reason or ".size()" in reason or "stride mismatch" in reason:
        return (
            "Give all batches one shape (pad them, drop_last=True), or mark the dim that changes with "
            "torch._dynamo.mark_dynamic(batch, dim) before the first step."
        )
    if "_sharded_state" in reason:
        return (
            "Call reshard() on the sharded modules after each forward without a backward, as in an evaluation: such a "
            "forward leaves the root's parameters unsharded."
        )
    if "==" in reason:
        return "Pass a value that changes from step to step as a tensor, or keep it out of the forward."
    return "Keep the object that the guard names unchanged in all steps."


def _settings(seen: Seen) -> Iterator[Finding]:
    for model in seen.models:
        if model.is_captured and model.settings is not None and not model.settings.fullgraph:
            what = f"{model.name} is compiled without fullgraph=True: a graph break would pass unnoticed."
            yield Finding(Level.NOTE, "not-fullgraph", what, f"Compile it with {COMPILE}.")
    others = dict.fromkeys(each.inner_backend for each in seen.captured.reports if each.inner_backend != "inductor")
    for name in others:
        what = f'The graphs are compiled by inner_backend="{name}": no copy of a gather is removed, no kernel made.'
        yield Finding(Level.COSTS, "inner-backend", what, "Leave out inner_backend, where Inductor runs.")


def _notes(seen: Seen) -> Iterator[Finding]:
    if not seen.steps and seen.failure is None:
        what = "No optimizer of torch made a step: the script ran to its own end."
        remedy = "Let the script train a step; an optimizer that is no torch.optim.Optimizer is not counted."
        yield Finding(Level.NOTE, "no-step", what, remedy)
    for note in dict.fromkeys(seen.captured.notes):
        if not note.startswith(FALLS_BACK):
            yield Finding(Level.NOTE, "warning", " ".join(note.split()), "See the message.")
