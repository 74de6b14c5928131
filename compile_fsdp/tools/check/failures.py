"""Turn an error of a script into a finding about its compiled step, or into a ScriptError."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from compile_fsdp.errors import (
    CompileFSDPError,
    EstimateError,
    ExplainError,
    PlanError,
    ProcessGroupMissingError,
    ScriptError,
    StateError,
)
from compile_fsdp.tools.check.findings import Finding, Level
from compile_fsdp.tools.check.rules import break_remedy, describe_reason
from compile_fsdp.tools.explain.capture import Place, is_library, last_user_place, split_reason
from compile_fsdp.torch_compat.dynamo import TorchDynamoException, TorchRuntimeError, Unsupported

# Errors that the package raises outside of a compiled step.
_ELSEWHERE = (EstimateError, ExplainError, PlanError, ProcessGroupMissingError, ScriptError, StateError)


def explain_failure(error: Exception, compiled_by: str | None) -> Finding | None:
    """Return the finding for an error that ended a script; None if the script caused it.

    Args:
        error: Exception that the script raised.
        compiled_by: Name of the backend that has compiled the sharded model, if not `compile_fsdp`; else None. If it is
            given, an error of a compiled call counts as an error of this backend.
    """
    if isinstance(error, Unsupported):
        message = str(error)
        reason, explanation, hints = split_reason(_without_module(message))
        place = last_user_place(message) or _raised_at(error)
        what = describe_reason(reason, explanation)
        return Finding(Level.BREAKS, "graph-break", what, break_remedy(hints), place)
    if isinstance(error, _ELSEWHERE):
        return None
    if isinstance(error, CompileFSDPError):
        name, message = type(error).__name__, str(error).partition("\n\n")[0]  # Dynamo appends advice on its logs
        what, has_remedy, remedy = message.rpartition("; ")
        if not has_remedy:
            what, remedy = message, f"see {name} in docs/errors.md"
        return Finding(Level.BREAKS, "refused", f"{name}: {what}.", _sentence(remedy), _raised_at(error))
    if isinstance(error, TorchRuntimeError):
        return None  # an op of the model failed on its inputs
    is_other_backend = compiled_by is not None and _passed_compiled_call(error)
    if isinstance(error, TorchDynamoException) or is_other_backend or _raised_by_compiler(error):
        remedy = (
            'Run a step eagerly, under torch.compiler.set_stance("force_eager"), to see whether it is the model\'s own '
            'error; options={"inner_backend": "aot_eager"} leaves out Inductor.'
            if not is_other_backend
            else 'Compile with backend="compile_fsdp".'
        )
        place = last_user_place(str(error)) or _raised_at(error)
        return Finding(Level.BREAKS, "compiler-error", f"{describe(error)}.", remedy, place)
    return None


def script_error(error: Exception, script: Path) -> ScriptError:
    """Make the ScriptError for an error that the script itself caused."""
    place = last_user_place(str(error)) or _raised_at(error)
    where = "" if place is None else f" at {place.filename}:{place.line} ({place.source})"
    return ScriptError(f"expected {script} to make its steps, got {describe(error)}{where}; {_remedy(error)}")


def print_traceback(error: Exception) -> None:
    """Print an error as Python does, without the frames between the command and the script."""
    trace = error.__traceback__
    while trace is not None and is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def describe(error: BaseException) -> str:
    """Class and first line of an error; for a TorchRuntimeError also the second line, which names the op."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if isinstance(error, TorchRuntimeError) else 1]).rstrip(".:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _remedy(error: Exception) -> str:
    message = str(error).lower()
    if any(name in message for name in ("cuda", "nvidia", "accelerator")) and not torch.cuda.is_available():
        return (
            "this machine has no GPU that torch can use: let the script take the device that is there, as in "
            '`"cuda" if torch.cuda.is_available() else "cpu"`, or check it on a machine with one'
        )
    return "the traceback above is the script's own: let it run for a few steps first"


def _passed_compiled_call(error: Exception) -> bool:
    """Whether an error passed through a compiled forward or backward, or through the compiler."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.startswith(("torch._dynamo.", "torch._functorch.", "torch._inductor.")) for module in modules)


def _raised_by_compiler(error: Exception) -> bool:
    """Whether Dynamo itself raised an error, such as the RuntimeError if it finds nothing to compile."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return str(last[0].f_globals.get("__name__")).startswith("torch._dynamo.")


def _without_module(message: str) -> str:
    """Remove the line that names the module from Dynamo's message."""
    first, _, rest = message.partition("\n")
    return rest if first.startswith("while compiling ") else message


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _raised_at(error: BaseException) -> Place | None:
    """The innermost line of the user's code in an error's traceback; None if there is none."""
    place, trace = None, error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not is_library(filename):
            place = Place.at(filename, trace.tb_lineno)
        trace = trace.tb_next
    return place
