"""Turn an error of a script into a finding about its compiled step, or into a ScriptError."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from compile_fsdp import errors
from compile_fsdp.errors import CompileFSDPError, ScriptError
from compile_fsdp.tools.check.findings import Finding, Level
from compile_fsdp.tools.check.rules import break_remedy, describe_reason
from compile_fsdp.tools.explain.capture import Place, innermost_place, is_library, last_user_place, split_reason
from compile_fsdp.tools.scripts import run_script
from compile_fsdp.torch_compat.dynamo import TorchDynamoException, TorchRuntimeError, Unsupported

# Modules that are on the stack of a compiled forward or backward, and of the compiler.
_COMPILERS = ("torch._dynamo.", "torch._functorch.", "torch._inductor.")

# Errors that the package raises outside of a compiled step.
_ELSEWHERE = (
    *(errors.EstimateError, errors.ExplainError, errors.PlanError, errors.ProcessGroupMissingError),
    *(errors.ScriptError, errors.StateError),
)


def explain_failure(error: Exception, has_other_backend: bool) -> Finding | None:
    """Return the finding for an error that ended a script; None if the script caused it.

    `has_other_backend`: whether a backend besides `compile_fsdp` compiled a sharded model. An error of a compiled call
    then counts as an error of this backend.
    """
    if isinstance(error, Unsupported):
        first, _, rest = str(error).partition("\n")
        reason, explanation, hints = split_reason(rest if first.startswith("while compiling ") else str(error))
        what = describe_reason(reason, explanation)
        return Finding(Level.BREAKS, "graph-break", what, break_remedy(hints), _find_place(error))
    if isinstance(error, _ELSEWHERE):
        return None
    if isinstance(error, CompileFSDPError):
        name, message = type(error).__name__, str(error).partition("\n\n")[0]  # Dynamo appends advice on its logs
        what, has_remedy, remedy = message.rpartition("; ")
        if not has_remedy:
            what, remedy = message, f"see {name} in docs/errors.md"
        remedy = remedy[:1].upper() + remedy[1:].rstrip(".") + "."
        return Finding(Level.BREAKS, "refused", f"{name}: {what}.", remedy, _raised_at(error))
    if isinstance(error, TorchRuntimeError):
        return None  # an op of the model failed on its inputs
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_other_backend = has_other_backend and any(module.startswith(_COMPILERS) for module in modules)
    # Dynamo itself raises a RuntimeError, for example if it finds nothing to compile.
    if isinstance(error, TorchDynamoException) or is_other_backend or modules[-1].startswith("torch._dynamo."):
        remedy = (
            'Run a step eagerly, under torch.compiler.set_stance("force_eager"), to see whether it is the model\'s own '
            'error; options={"inner_backend": "aot_eager"} leaves out Inductor.'
            if not is_other_backend
            else 'Compile with backend="compile_fsdp".'
        )
        return Finding(Level.BREAKS, "compiler-error", f"{describe(error)}.", remedy, _find_place(error))
    return None


def report_error(error: Exception, script: Path) -> ScriptError:
    """Print an error that the script itself caused, without the frames above the script, and make its ScriptError."""
    trace = error.__traceback__
    while trace is not None and is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    place = _find_place(error)
    where = "" if place is None else f" at {place.filename}:{place.line} ({place.source})"
    return ScriptError(f"expected {script} to make its steps, got {describe(error)}{where}; {_remedy(error)}")


def run_reported(script: Path, arguments: list[str]) -> None:
    """Run a script with `run_script`; print the traceback of its error, and raise the error as a `ScriptError`."""
    try:
        run_script(script, arguments)
    except ScriptError:
        raise
    except Exception as error:
        raise report_error(error, script) from error


def describe(error: Exception) -> str:
    """Class and first line of an error, and the second line of an error of Dynamo, which names the construct or op."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    has_two = isinstance(error, TorchRuntimeError) or (lines and lines[0].startswith(("while compiling ", "backend=")))
    line = " ".join(lines[: 2 if has_two else 1]).rstrip(".:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _remedy(error: Exception) -> str:
    if isinstance(error, Unsupported):
        return "compile-fsdp check names the line that breaks the graph, and a remedy"
    message = str(error).lower()
    if any(name in message for name in ("cuda", "nvidia", "accelerator")) and not torch.cuda.is_available():
        return (
            "this machine has no GPU that torch can use: let the script take the device that is there, as in "
            '`"cuda" if torch.cuda.is_available() else "cpu"`, or check it on a machine with one'
        )
    return "the traceback above is the script's own: let it run for a few steps first"


def _find_place(error: Exception) -> Place | None:
    """The line of the user's code that an error's message names, or else the line that raised the error."""
    return last_user_place(str(error)) or _raised_at(error)


def _raised_at(error: Exception) -> Place | None:
    """The innermost line of the user's code in an error's traceback; None if there is none."""
    return innermost_place((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
