"""All errors that this library raises on purpose. Every message names the remedy.

SkyRLError
  ConfigError            a setting is unknown, impossible, or contradicts another
    NoSuchRunError       there is no run of this name
  DataError              a data set is missing, empty or has a broken line
  ModelError             a model folder cannot be used
  CheckpointError        a checkpoint cannot be written, or does not belong to this run
  GeneratorOutputError   a generator returned fields that break the contract
  RolloutError           a rollout failed (raised, timed out) more often than the run allows
    NonFiniteRewardError a reward is NaN or infinite; it counts as a failed rollout
    RolloutActorError    the actor in which it ran is gone; it runs again in another one
  StageError             a stage between generation and training failed; the message names the stage
  StalenessError         the staleness bound or the slot accounting was violated: a bug, never data
  EvaluationError        an evaluation got tokens of another policy version
  RequestError           no engine can serve a request; other requests are not affected
  SessionError           a session is unknown, has ended, or does not support the request
  QuotaError             no more sessions can be opened now; contains the time to retry
  EngineError            an inference engine failed
    EngineDeadError      the engine is gone; its requests can continue elsewhere
    NoEngineError        no engine is left
  NonFiniteStepsError    losses or gradients were not finite for too many steps in a row
  TrainingWorkerError    a process with a shard of policy, reference or critic is gone; the message names rank and node
  HalfStepError          policy and critic are out of step
  WeightSyncError       new weights did not reach the engines; they still serve the old ones
  SimulationError        a run in virtual time cannot continue: a deadlock, or blocking work in the wrong place
"""

from __future__ import annotations

READ_AGAIN = "It may be intact; make it readable and run the same command again."  # where may_pass() is true
AGENT_OUTPUT = "Output of the agent program for sample"  # how observability/failures.py finds such a note


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty, for use in another message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def may_pass(error: BaseException) -> bool:
    """Return whether reading a file may succeed later: it failed by too many open files, or a disk that is full or gone."""
    missing = FileNotFoundError | NotADirectoryError | IsADirectoryError
    return isinstance(error, OSError) and not isinstance(error, missing)


def output_note(sample: str, output: str) -> str:
    """Return the output of an agent program as a note of its run's error, which travels with tracebacks between processes."""
    return f"{AGENT_OUTPUT} {sample!r}:\n{output}\nEnd of the output."


class SkyRLError(Exception):
    """Root of every error that this library raises on purpose; entry points print it without a traceback."""

    @property
    def docs(self) -> str:
        """The section of the documentation about this family of errors, named after the class below this one."""
        kinds = type(self).__mro__
        root = kinds.index(SkyRLError)
        return "docs/tutorials/errors.md" + (f"#{kinds[root - 1].__name__.lower()}" if root else "")


class ConfigError(SkyRLError):
    """A setting is unknown, impossible, or contradicts another."""


class NoSuchRunError(ConfigError):
    """There is no run of this name, or in this folder."""


class DataError(SkyRLError):
    """A data set is missing, empty, or has a broken line (the message names file and line)."""


class ModelError(SkyRLError):
    """A model folder cannot be used: no weights, no tokenizer, or an architecture that torch cannot build."""


class CheckpointError(SkyRLError):
    """A checkpoint cannot be written or does not belong to this run; the previous one is untouched."""


class GeneratorOutputError(SkyRLError):
    """A generator returned fields that break the contract; the message names the field and the sample."""


class RolloutError(SkyRLError):
    """Rollouts failed more often than the run allows; the last failure is the cause."""


class NonFiniteRewardError(RolloutError):
    """A reward is NaN or infinite; the message names its sample. The rollout counts as failed."""


class RolloutActorError(RolloutError):
    """The actor in which a rollout ran has ended; the message names it. The rollout runs again in another actor."""


class StageError(SkyRLError):
    """A stage between generation and training failed for a reason outside the rollout; the message names the stage."""


class StalenessError(SkyRLError):
    """The staleness bound or the slot accounting was violated. This is a bug of this library, never caused by data."""


class EvaluationError(SkyRLError):
    """An evaluation got tokens of another policy version than the one it measures, so its figures describe no policy."""


class RequestError(SkyRLError):
    """No engine can serve a request (the prompt is empty or too long); other requests are not affected."""


class GrammarError(RequestError):
    """A response cannot follow its grammar: the grammar cannot be compiled, or became too complex. The message says why.

    ``field``: the field of the request that asks for it, if that is known.
    """

    field: str | None = None  # no argument of the constructor: an error travels between processes as its message

    @classmethod
    def of_field(cls, field: str, message: str) -> GrammarError:
        """Return an error whose message begins with the field."""
        error = cls(f"{field}: {message}")
        error.field = field
        return error


class SessionError(SkyRLError):
    """A session is unknown, has ended, or does not support the request. A retry does not help."""


class QuotaError(SkyRLError):
    """No more sessions can be opened now. ``retry_after_s``: seconds to wait before a retry."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(SkyRLError):
    """An inference engine failed."""


class EngineDeadError(EngineError):
    """The engine is gone. Its requests can continue on another engine."""


class NoEngineError(EngineError):
    """No engine is left; the message says why the last one left."""


class NonFiniteStepsError(SkyRLError):
    """The loss or the gradient was not finite for more steps in a row than the run allows. None of them moved the policy."""


class TrainingWorkerError(SkyRLError):
    """A process with a shard of the policy, reference or critic is gone, and the other ranks with it.

    The message names rank and node. The run can resume from its last checkpoint.
    """


class HalfStepError(SkyRLError):
    """Policy and critic are out of step: one applied an optimizer step that the other rejected.

    Only the last checkpoint has both at the same step. The message names the rejected step.
    """


class WeightSyncError(SkyRLError):
    """New weights did not reach the engines; engines that still serve have the old weights."""


class SimulationError(SkyRLError):
    """A run in virtual time cannot continue: all tasks wait forever, or modelled work runs where it must not block."""
