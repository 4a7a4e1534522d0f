"""The few ways in which things can fail. Every message says what to do.

SkyRLError
  ConfigError            a setting is unknown, impossible, or contradicts another
  DataError              a data set is missing, empty or has a broken line
  ModelError             a model folder cannot be used
  CheckpointError        a checkpoint cannot be written, or does not belong to this run
  GeneratorOutputError   a generator returned fields that break the contract
  RolloutError           a rollout failed (raised, timed out) more often than the run allows
    NonFiniteRewardError a reward is NaN or infinite; it counts as a failed rollout
    RolloutActorError    the actor that it ran in is gone; it is played again in another one
  StageError             a stage between generation and training failed; the message names the stage
  StalenessError         the staleness bound or the slot accounting was violated: a bug, never data
  EvaluationError        an evaluation met another policy version than the one it measures
  RequestError           a request that no engine can serve; other requests are not concerned
  SessionError           a session is unknown, has ended, or cannot do what is asked of it
  QuotaError             no further session can be opened for now; it says when to come back
  EngineError            an inference engine failed
    EngineDeadError      the engine is gone; its requests can continue elsewhere
    NoEngineError        no engine is left
  NonFiniteStepsError    losses or gradients were not finite for too many steps in a row
  TrainingWorkerError    a process with a part of the policy (or reference, or critic) is gone; the message names rank and node
  HalfStepError          one of policy and critic has made a step that the other has refused
  PublicationError       new weights did not reach the engines; they still serve the old ones
  SimulationError        a run in virtual time cannot go on: a deadlock, or modelled work in the wrong place
"""


class SkyRLError(Exception):
    """Root of every error that this library raises on purpose; entry points print it without a traceback."""


class ConfigError(SkyRLError):
    """A setting is unknown, impossible, or contradicts another."""


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
    """A reward is NaN or infinite; the message names its sample. Nothing is learned from it: the rollout counts as failed."""


class RolloutActorError(RolloutError):
    """The actor that a rollout ran in has ended; the message names it. It is played again in another one."""


class StageError(SkyRLError):
    """A stage between generation and training failed, which is not the rollout's fault; the message names the stage."""


class StalenessError(SkyRLError):
    """The staleness bound or the slot accounting was violated. This is a bug of ours, never the data's."""


class EvaluationError(SkyRLError):
    """An evaluation met tokens of another policy version than the one it measures: what it would report is of no policy."""


class RequestError(SkyRLError):
    """A request that no engine can serve (an empty prompt, one that does not fit); other requests are not concerned."""


class SessionError(SkyRLError):
    """A session is unknown, has ended, or cannot do what is asked of it. Asking again does not help."""


class QuotaError(SkyRLError):
    """No further session can be opened for now. ``retry_after_s``: seconds after which asking again makes sense."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(SkyRLError):
    """An inference engine failed."""


class EngineDeadError(EngineError):
    """The engine is gone. Its requests can continue on another one."""


class NoEngineError(EngineError):
    """No engine is left; the message says why the last one left."""


class NonFiniteStepsError(SkyRLError):
    """The loss or the gradient was not finite for more steps in a row than the run allows. None of them moved the policy."""


class TrainingWorkerError(SkyRLError):
    """A process that has a part of the policy, or of a sharded reference, is gone, and the others with it; the message names
    rank and node. The run can go on from its last checkpoint.
    """


class HalfStepError(SkyRLError):
    """One of policy and critic has made a step that the other has refused: only the last checkpoint has both of the same
    step. The message says what was refused.
    """


class PublicationError(SkyRLError):
    """New weights did not reach the engines; those that still serve hold the weights they had."""


class SimulationError(SkyRLError):
    """A run in virtual time cannot go on: everything waits for something that nothing will bring about, or modelled work
    runs where it must not block."""
