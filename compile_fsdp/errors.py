"""The package's exceptions: one type for each kind of mistake, whose messages say what to do.

All errors leave model and state usable, and all but
`VerificationError` and `RanksPartedError` are raised before any collective is issued.
"""

from __future__ import annotations

from compile_fsdp.torch_compat.dynamo import ShortenTraceback


class CompileFSDPError(ShortenTraceback):
    """Base of every error this project raises.

    It derives from `ShortenTraceback`, a `RuntimeError` that Dynamo passes through unchanged: an error raised while a
    model is being traced reaches the user as it is, not inside an internal error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class NotShardedError(CompileFSDPError):
    """The model given to the backend, or to `make_traceable`, has no FSDP2 module."""


class FSDP1Error(CompileFSDPError):
    """The model contains `FullyShardedDataParallel` (FSDP1) modules, which cannot be traced."""


class ProcessGroupMissingError(CompileFSDPError):
    """No process group is initialised."""


class ParameterDeviceError(CompileFSDPError):
    """Parameters are on the meta device, or on another device than the mesh."""


class ParameterDtypeError(CompileFSDPError):
    """Trainable parameters of one group differ in dtype."""


class ReplacedParameterError(CompileFSDPError):
    """A tensor that is not sharded has taken the place of a sharded parameter."""


class RootError(CompileFSDPError):
    """A module of the model was the root of a forward before the model itself."""


class OutputTypeError(CompileFSDPError):
    """A sharded module returns an object whose tensors cannot be found."""


class UnknownOptionError(CompileFSDPError):
    """An option of the backend does not exist or has a wrong value."""


class UnsupportedFeatureError(CompileFSDPError):
    """A feature of FSDP2 that works eagerly and cannot be compiled yet."""


class MemoryBudgetError(CompileFSDPError):
    """A step does not fit into its `memory_budget`; raised on all ranks."""


class CollectiveMismatchError(CompileFSDPError):
    """Ranks have compiled graphs with different collectives. All ranks raise, before any collective of the graph."""


class RankMissingError(CompileFSDPError):
    """A rank has not compiled the graph that the other ranks wait to run."""


class RanksPartedError(CompileFSDPError):
    """A collective has failed, and ranks have begun different graphs. The step is lost; end the job, or restart it."""


class NotPortableError(CompileFSDPError):
    """A step cannot be run again without tracing, or a bundle is not for it. Caught, and logged with its text."""


class VerificationError(CompileFSDPError):
    """The option `verify` found a graph that differs from the traced one, or a wrong gradient; raised on all ranks."""


class BackwardError(CompileFSDPError):
    """Base of the errors for what a compiled backward cannot do."""


class SecondBackwardError(BackwardError):
    """A second backward through the same compiled graph."""


class DoubleBackwardError(BackwardError):
    """A backward through the compiled backward, as `create_graph=True` asks for."""


class PartialBackwardError(BackwardError):
    """`torch.autograd.grad`, or `backward(inputs=...)`, through a compiled sharded model."""


class PlanError(CompileFSDPError):
    """Base of the errors about a plan that cannot be applied; the model is unchanged."""


class PolicyError(PlanError):
    """A policy returns modules that are not in the model, or arguments that `fully_shard` does not have."""


class NothingSelectedError(PlanError):
    """A policy selects no module below the root."""


class IgnoredModuleError(PlanError):
    """A policy selects a module that is to be ignored, or an ignored module is not below the root."""


class AlreadyShardedError(PlanError):
    """A selected module is sharded already, or is inside a sharded module."""


class NoForwardError(PlanError):
    """A selected module has no forward, so that its hooks would never run."""


class SharedParameterError(PlanError):
    """A parameter, or a module, would be in two groups."""


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
    """A step cannot be explained: the number of ranks is missing or wrong, or rich is not installed."""


class ScriptError(CompileFSDPError):
    """A command cannot run the user's script, or does not find in it what it is to work on."""


class MissingExtraError(CompileFSDPError, ImportError):
    """An integration is imported, and the trainer that it is for is not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str) -> MissingExtraError:
        return cls(f"expected {package} to be installed; install it with: pip install 'compile-fsdp[{extra}]'")


class AlreadyCompiledError(CompileFSDPError):
    """A trainer, or its user, has compiled a model that an integration is to compile."""
