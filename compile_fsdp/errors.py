"""The package's exceptions: a type for each kind of mistake, with messages that give the remedy.

All errors leave model and state usable. All errors except `VerificationError` and `RanksPartedError` are raised before
any collective is issued.
"""

from __future__ import annotations

from compile_fsdp.torch_compat.dynamo import ShortenTraceback


class CompileFSDPError(ShortenTraceback):
    """Base of every error this project raises.

    Dynamo re-raises `ShortenTraceback`, a `RuntimeError`, unchanged. So an error raised in a trace reaches the user
    directly, not inside an internal error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class NotShardedError(CompileFSDPError):
    """The model given to the backend or to `make_traceable` has no FSDP2 module."""


class FSDP1Error(CompileFSDPError):
    """The model contains `FullyShardedDataParallel` (FSDP1) modules, which cannot be traced."""


class ProcessGroupMissingError(CompileFSDPError):
    """No process group is initialised."""


class ParameterDeviceError(CompileFSDPError):
    """Parameters are on the meta device, or not on the mesh's device."""


class ParameterDtypeError(CompileFSDPError):
    """Trainable parameters of one group differ in dtype."""


class ReplacedParameterError(CompileFSDPError):
    """A plain tensor has replaced a sharded parameter."""


class RootError(CompileFSDPError):
    """A submodule ran as the FSDP2 root before the model did."""


class OutputTypeError(CompileFSDPError):
    """A sharded module returns an object whose tensors the package cannot find."""


class UnknownOptionError(CompileFSDPError):
    """An option of the backend does not exist or has a wrong value."""


class UnsupportedFeatureError(CompileFSDPError):
    """The model uses a feature of FSDP2 that works eagerly and cannot be compiled yet."""


class MemoryBudgetError(CompileFSDPError):
    """A step does not fit into its `memory_budget`; raised on all ranks."""


class CollectiveMismatchError(CompileFSDPError):
    """Ranks have compiled graphs with different collectives; raised on all ranks before the first collective."""


class RankMissingError(CompileFSDPError):
    """A rank has not compiled a graph that the remaining ranks wait to run."""


class RanksPartedError(CompileFSDPError):
    """A collective failed, and ranks have begun different graphs. The step is lost; end or restart the job."""


class NotPortableError(CompileFSDPError):
    """A step cannot run again without a trace, or a bundle does not fit it. The package catches and logs the error."""


class VerificationError(CompileFSDPError):
    """The option `verify` found a wrong gradient, or a graph that differs from its trace; raised on all ranks."""


class BackwardError(CompileFSDPError):
    """Base of the errors for operations that a compiled backward does not support."""


class SecondBackwardError(BackwardError):
    """A second backward ran through a compiled graph."""


class DoubleBackwardError(BackwardError):
    """A backward through the compiled backward was requested, for example with `create_graph=True`."""


class PartialBackwardError(BackwardError):
    """`torch.autograd.grad` or `backward(inputs=...)` was called through a compiled sharded model."""


class PlanError(CompileFSDPError):
    """Base of the errors about a plan that cannot be applied; the model is unchanged."""


class PolicyError(PlanError):
    """A policy returns modules outside the model, or arguments that `fully_shard` does not have."""


class NothingSelectedError(PlanError):
    """A policy selects no module below the root."""


class IgnoredModuleError(PlanError):
    """A policy selects an ignored module, or an ignored module is not below the root."""


class AlreadyShardedError(PlanError):
    """A selected module is already sharded, or is inside a sharded module."""


class NoForwardError(PlanError):
    """A selected module has no forward, so its hooks would never run."""


class SharedParameterError(PlanError):
    """A parameter or a module would be in two groups."""


class UnshardableParameterError(PlanError):
    """A parameter cannot be sharded: it is a scalar, not contiguous, or split unevenly on a dim other than 0."""


class PrecisionOverrideError(PlanError):
    """A module cannot be made to run in full precision."""


class MixedFrozenWarning(UserWarning):
    """Trainable and frozen parameters are in one group."""


class StaleOptimizerWarning(UserWarning):
    """An optimizer holds parameters that `fully_shard` has replaced."""


class StateError(CompileFSDPError):
    """Base of the errors about optimizer state and checkpoints; model and optimizer are unchanged."""


class ForeignParameterError(StateError):
    """An optimizer holds parameters that are not in the model."""


class StateMismatchError(StateError):
    """A state does not fit the model or the optimizer: missing, unexpected, wrong-shape or wrong-dtype entries."""


class RekeyError(StateError):
    """A state's parameter ids cannot be matched with the model's parameters."""


class CheckpointError(StateError):
    """A checkpoint cannot be found, read or written."""


class EstimateError(CompileFSDPError):
    """Memory and communication cannot be estimated for the given model, options or files."""


class OpDefinitionError(CompileFSDPError):
    """torch defines an operator in a way that the runtime cannot use."""


class ExplainError(CompileFSDPError):
    """A step cannot be explained: the number of ranks is missing or wrong."""


class CommandError(CompileFSDPError):
    """The options of a command are wrong, or this host lacks a package or devices that they need."""


class ScriptError(CompileFSDPError):
    """A command cannot run the user's script, or does not find the objects it needs in the script."""


class MissingExtraError(CompileFSDPError, ImportError):
    """An integration is imported, but its trainer is not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str) -> MissingExtraError:
        return cls(f"expected {package} to be installed; install it with: pip install 'compile-fsdp[{extra}]'")


class AlreadyCompiledError(CompileFSDPError):
    """A trainer or its user has compiled a model before an integration could compile it."""
