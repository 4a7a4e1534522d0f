"""Rewards computed outside the rollout: a user's function scores the samples of each finished group.

def reward(group: GroupToReward) -> list[float]: ...            # one number per sample
async def reward(group: GroupToReward) -> list[float]: ...
class Reward:                                                   # constructed once per worker, such as a reward model
    def __init__(self, **kwargs): ...
    def __call__(self, group: GroupToReward) -> list[float]: ...

A function whose first parameter is ``prompts`` or ``completions``, or that requires one of them, is a reward function
of TRL. It gets what it names of ``prompts``, ``completions``, ``completion_ids`` and the other columns of the data row,
each as a list with one entry per sample; a setting in ``kwargs`` wins over a column of its name. Prompts and
completions are text where the data set has text, else lists of messages.

The entry of a sample may be ``{"reward": number, "metrics": {name: number}}``; the metrics are averaged as
``environment/<name>``. :class:`WeightedSum` is several functions as one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_train.config.import_path import import_name
from skyrl_train.config.keys import nearest
from skyrl_train.environments.base import PromptRecord, copied
from skyrl_train.errors import ConfigError, NonFiniteRewardError, RolloutError, StageError
from skyrl_train.generators.validation import is_finite
from skyrl_train.observability.failures import OnFailure
from skyrl_train.rollout.stages.pipeline import Stage
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample
from skyrl_train.workers.executors import CallFailed, Executor, Function, Work

logger = logging.getLogger(__name__)

SETTING = "rollout.stages.reward.function"


@dataclass(frozen=True, slots=True)
class SampleToReward:
    """A finished trajectory; of a trajectory with several sequences, the last one.

    Attributes:
        text: the whole response without special tokens; with several turns, the messages of tools and environment included.
        prompt_token_ids: ``[P]``.
        response_ids: ``[T]``.
        loss_mask: ``[T]``, 1 on the tokens that the policy sampled, else 0.
        stop_reason: reason for the end of the response, such as "stop" or "length".
        reward: the generator's reward for the whole trajectory.
    """

    text: str
    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    stop_reason: str
    reward: float


@dataclass(frozen=True, slots=True)
class GroupToReward:
    """All samples of a prompt, and the prompt's row of the data set.

    Attributes:
        uid: name of the prompt.
        data_source: its source.
        prompt: the conversation of ``{"role", "content"}``.
        env_extras: the row's other columns, such as the correct answer.
        samples: the trajectories to score.
        is_text: the row has text, from which ``prompt`` has its only message.
    """

    uid: str
    data_source: str
    prompt: Sequence[Mapping[str, Any]]
    env_extras: Mapping[str, Any]
    samples: tuple[SampleToReward, ...]
    is_text: bool = False

    def own_copy(self) -> GroupToReward:
        """Return a copy for one call of user code, which may write into the lists and mappings that it receives."""
        samples = (
            replace(
                sample,
                prompt_token_ids=[*sample.prompt_token_ids],
                response_ids=[*sample.response_ids],
                loss_mask=[*sample.loss_mask],
            )
            for sample in self.samples
        )
        return replace(self, prompt=copied(self.prompt), env_extras=copied(self.env_extras), samples=tuple(samples))


def load_reward_function(path: str, kwargs: Mapping[str, Any]) -> Function:
    """Return the function at ``path`` with ``kwargs`` bound, or an instance of the class there.

    Raises:
        ConfigError: it cannot be imported, or does not accept ``kwargs``.
    """
    target = import_name(path, SETTING, "function")
    try:
        function: Any = target(**kwargs) if inspect.isclass(target) else functools.partial(target, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{SETTING}={path!r} cannot be constructed with rollout.stages.reward.kwargs: {error}"
        ) from error
    return functools.partial(_call_with_columns, function) if _is_of_trl(target) else function


def _signature(target: Any) -> inspect.Signature | None:
    """Return the signature of the function, or of a class's ``__call__`` without ``self``; None if it has none (C code)."""
    is_class = inspect.isclass(target)
    try:
        signature = inspect.signature(target.__call__ if is_class else target)
    except ValueError:
        return None
    return signature.replace(parameters=list(signature.parameters.values())[is_class:])


def _is_of_trl(target: Any) -> bool:
    """Return whether the function or class has the shape of TRL's reward functions."""
    signature = _signature(target)
    parameters = [] if signature is None else list(signature.parameters.values())
    return any(
        parameter.name in ("prompts", "completions") and (not index or parameter.default is parameter.empty)
        for index, parameter in enumerate(parameters)
    )


def _call_with_columns(function: Callable[..., Any], group: GroupToReward) -> Any:
    """Call a reward function of TRL; an ``async def`` returns its coroutine."""
    count, texts = len(group.samples), [sample.text for sample in group.samples]

    def for_each(value: Any) -> list[Any]:
        return [copied(value) for _ in range(count)]  # as with TRL, a change to one sample's is none to the others'

    as_messages = [[{"role": "assistant", "content": text}] for text in texts]
    given: dict[str, Any] = {
        **{name: for_each(value) for name, value in group.env_extras.items()},
        **(function.keywords if isinstance(function, functools.partial) else {}),  # the setting wins over a column
        "prompts": for_each(group.prompt[0]["content"] if group.is_text else group.prompt),
        "completions": texts if group.is_text else as_messages,
        "completion_ids": [sample.response_ids for sample in group.samples],
    }
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    return function(**given)


class WeightedSum:
    """Several reward functions: a sample's reward is the sum of theirs, each times its weight.

    As in TRL, the reward None says that a function does not judge a sample. The mean of each function, without its weight and
    over the samples that it judged, is the metric ``environment/<its name>``.

    Args:
        functions: import paths of functions, or of classes without arguments.
        weights: of each function; None: 1 each.

    Raises:
        ConfigError: (constructor) there are no functions, two have one name, or the weights are others than theirs.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float] | None = None) -> None:
        names = [_name(path) for path in functions]
        if isinstance(functions, str) or not names or len(set(names)) < len(names):
            raise ConfigError(
                f"rollout.stages.reward.kwargs.functions={functions!r}: name at least one reward function, each with a name of "
                "its own, by which metrics tell them apart."
            )
        if weights is not None and not (len(weights) == len(names) and all(map(_is_number, weights))):
            raise ConfigError(
                f"rollout.stages.reward.kwargs.weights={weights!r}: must be one number for each of the {len(names)} functions."
            )
        self.functions = {name: load_reward_function(path, {}) for name, path in zip(names, functions, strict=True)}
        self._weights = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]

    def __call__(self, group: GroupToReward) -> Any:
        """Return an entry per sample; a coroutine if a function is an ``async def``."""
        answers = [function(group.own_copy()) for function in self.functions.values()]
        if not any(map(inspect.isawaitable, answers)):
            return self._sum(answers, len(group.samples))

        async def answer(value: Any) -> Any:
            return await value if inspect.isawaitable(value) else value

        async def awaited() -> Any:
            return self._sum(await gather_or_cancel(map(answer, answers)), len(group.samples))

        return awaited()

    def _sum(self, answers: Sequence[Any], count: int) -> list[dict[str, Any]]:
        sums: list[float] = [0.0] * count
        metrics: list[dict[str, float]] = [{} for _ in range(count)]
        for name, weight, answer in zip(self.functions, self._weights, answers, strict=True):
            values = _entries(answer)
            if len(values) != count:
                raise StageError(
                    f"The reward function {name} returned {answer!r:.200} for {count} samples. It must return one number, or "
                    "None, for each of them, in their order."
                )
            for index, entry in enumerate(values):
                value, further = _reward_and_metrics(entry)
                metrics[index].update(further)
                if value is not None:
                    if isinstance(value, str):
                        raise StageError(
                            f"The reward function {name} returned the text {value!r:.80} as a reward, no number."
                        )
                    metrics[index][name] = value
                    sums[index] += weight * value
        return [{"reward": total, "metrics": each} for total, each in zip(sums, metrics, strict=True)]


def _name(path: str) -> str:
    return path.rpartition(":")[2].rpartition(".")[2]


def _parts(path: str, kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Return path, object and arguments of the function at ``path``; of a :class:`WeightedSum`, of each of its functions.

    Raises:
        ConfigError: one cannot be imported, or ``kwargs`` are not those of a sum.
    """
    target = import_name(path, SETTING, "function")
    if target is not WeightedSum:
        return [(path, target, kwargs)]
    functions = kwargs.get("functions")
    if not isinstance(functions, Sequence) or isinstance(functions, str):
        raise ConfigError("rollout.stages.reward.kwargs.functions: list the import paths of the functions to sum.")
    return [(part, import_name(part, SETTING, "function"), {}) for part in functions]


def is_async(path: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``path`` names an ``async def``, a class whose ``__call__`` is one, or a sum of nothing else.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    parts = _parts(path, kwargs)
    for part, target, _ in parts:
        if not callable(target) or (inspect.isclass(target) and "__call__" not in dir(target)):
            raise ConfigError(
                f"{SETTING}={part!r} cannot be called. Name a function, or a class with a __call__ method."
            )
    return all(
        inspect.iscoroutinefunction(target.__call__ if inspect.isclass(target) else target) for _, target, _ in parts
    )


def check_signature(path: str, kwargs: Mapping[str, Any]) -> None:
    """Check that the reward function takes one group and ``kwargs``, or is one of TRL.

    Raises:
        ConfigError: it takes other arguments.
    """
    for part, target, bound in _parts(path, kwargs):
        signature = _signature(target)
        if signature is None:
            continue
        arguments = {} if inspect.isclass(target) else bound
        try:
            if _is_of_trl(target):
                signature.bind_partial(**arguments)
            else:
                signature.bind(None, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"{SETTING}={part!r} takes {signature}, and is called "
                f"with the samples of a prompt, its group, and rollout.stages.reward.kwargs ({error}). Write "
                f"def {_name(part)}(group), which returns one number for each of group.samples; sample.text is a response, "
                "and group.env_extras has the other columns of the data row. A reward function of TRL names completions."
            ) from error


def column_check(path: str, kwargs: Mapping[str, Any]) -> Callable[[PromptRecord], None]:
    """Return a check of a prompt: that its row has the columns which a reward function of TRL requires.

    Raises:
        ConfigError: the function cannot be imported; of the check: a column is missing.
    """
    always = ("prompts", "completions", "completion_ids")
    needed: list[tuple[str, str]] = []  # the function, and the column
    for part, target, arguments in _parts(path, kwargs):
        signature = _signature(target)
        if signature is None or not _is_of_trl(target):
            continue
        given = {*always, *(() if inspect.isclass(target) else arguments)}
        for parameter in signature.parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and parameter.name not in given:
                needed.append((part, parameter.name))

    def check(record: PromptRecord) -> None:
        for part, column in needed:
            if column not in record.env_extras:
                close = nearest(column, {*always, *record.env_extras})
                raise ConfigError(
                    f"{SETTING}={part!r} names {column!r}, and prompt {record.uid!r} has no such column."
                    f"{f' Did you mean {close}?' if close else ''} It gets prompts, completions, completion_ids and the columns "
                    f"of its row: {', '.join(sorted(record.env_extras)) or 'none'}."
                )

    return check


def reward_work(path: str, kwargs: Mapping[str, Any]) -> Work:
    """Return the reward function in the form that the executors take."""
    return Work(f"{__name__}:{load_reward_function.__name__}", {"path": path, "kwargs": dict(kwargs)})


class RewardStage(Stage):
    """Replaces the generator's rewards by the function's.

    A function that raises, hangs or ends its process is called again with the same samples; nothing is generated again. If
    that does not help, the rollout has failed. A function that returns anything but its rewards stops the run.

    Args:
        decode: converts tokens to text, without special tokens.
        max_parallel: groups that are scored at once.
        attempts: calls per group, at least one.
        timeout_s: time limit of one call; None: no limit.
        on_failure: called with the group's name, the reason and the error of each failed call.
        path: the import path of the function, for messages.
    """

    name = "reward"

    def __init__(
        self,
        executor: Executor,
        decode: Callable[[Sequence[int]], str],
        *,
        max_parallel: int,
        attempts: int = 1,
        timeout_s: float | None = None,
        on_failure: OnFailure = lambda name, reason, error: None,
        path: str = "",
    ) -> None:
        self.executor: Executor = executor
        self._path = path
        self._decode = decode
        self.max_parallel = max_parallel
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._on_failure = on_failure

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        for attempt in range(1, self._attempts + 1):
            # Built anew, because user code may write into it.
            question = group_to_reward(record, group.samples, self._decode)
            try:
                answer = await self.executor.call(question, self._timeout_s)
            except CallFailed as failure:
                if isinstance(failure.error, StageError):  # a sum says that one of its functions breaks the contract
                    raise failure.error from failure
                reason = f"its reward function failed: {failure.reason}"
                self._on_failure(group.name, reason, failure)
                if attempt == self._attempts:
                    raise RolloutError(
                        f"the rollout of prompt {question.uid!r} has no reward after {attempt} attempts; the last time "
                        f"{reason}"
                    ) from failure
                logger.warning("%s: %s (attempt %d of %d)", group.name, reason, attempt, self._attempts)
            else:
                samples = with_rewards(group.samples, answer, self._path)
                metrics = {**group.metrics, **mean_metrics(answer)}  # raises if a part is no number
                parts = [
                    {name: float(value) for name, value in _reward_and_metrics(entry)[1].items()} for entry in answer
                ]
                samples = tuple(
                    replace(sample, reward_parts=of_sample or None)
                    for sample, of_sample in zip(samples, parts, strict=True)
                )
                return replace(group, samples=samples, metrics=metrics)
        raise ValueError("attempts must be at least 1")


def group_to_reward(
    record: PromptRecord, samples: Sequence[Sample], decode: Callable[[Sequence[int]], str]
) -> GroupToReward:
    """Build the argument of one call of the reward function, which shares no list and no mapping with others. Pure."""
    record = record.own_copy()
    lasts = [sample.sequences[-1] for sample in samples]
    return GroupToReward(
        uid=record.uid,
        data_source=record.data_source,
        prompt=record.prompt,
        env_extras=record.env_extras,
        is_text=record.is_text,
        samples=tuple(
            SampleToReward(
                text=decode(last.response_ids),
                prompt_token_ids=last.prompt_token_ids,
                response_ids=last.response_ids,
                loss_mask=last.loss_mask,
                stop_reason=last.stop_reason,
                reward=sample.reward,
            )
            for sample, last in zip(samples, lasts, strict=True)
        ),
    )


def with_rewards(samples: Sequence[Sample], answer: Any, path: str = "") -> tuple[Sample, ...]:
    """Return ``samples`` with the rewards of ``answer``, each on the last token of its sample. Pure.

    A sample without tokens cannot hold a reward. Messages name the function by its import ``path``.

    Raises:
        StageError: ``answer`` is not one number per sample.
        NonFiniteRewardError: a reward is NaN or infinite, in float64 or float32.
    """
    try:
        values = [_reward_and_metrics(entry)[0] for entry in _entries(answer)]
        # float() would read a text.
        if any(isinstance(value, str) for value in values):
            raise TypeError
        rewards = [float(value) if is_finite(value) else math.nan for value in values]
    except (TypeError, ValueError):
        # No list of numbers: the check of the length below reports the answer.
        rewards = []
    if len(rewards) == len(samples) and any(map(math.isnan, rewards)):
        raise NonFiniteRewardError(
            f"the reward function ({SETTING}={path}) returned {answer!r:.200}; rewards must be finite, also in float32"
        )
    if len(rewards) != len(samples):
        raise StageError(
            f"The reward function ({SETTING}={path}) returned {answer!r:.200} for {len(samples)} samples. It must return "
            "one finite number for each of them, in their order."
        )
    return tuple(_with_reward(sample, reward) for sample, reward in zip(samples, rewards, strict=True))


def mean_metrics(answer: Iterable[Any]) -> dict[str, float]:
    """Return the means of the metrics in ``answer``, each over the samples that have it, as ``environment/<name>``. Pure.

    Raises:
        StageError: a metric is no number.
        NonFiniteRewardError: a metric is NaN or infinite.
    """
    values: dict[str, list[float]] = {}
    for entry in answer:
        for name, value in _reward_and_metrics(entry)[1].items():
            if not _is_number(value):
                # As for rewards: a NaN is a fault of this rollout, anything else one of the function.
                kind = NonFiniteRewardError if hasattr(value, "__float__") else StageError
                raise kind(
                    f"The reward function ({SETTING}) returned the metric {name}={value!r:.80}, no finite number."
                )
            values.setdefault(f"environment/{name}", []).append(float(value))
    return {name: math.fsum(each) / len(each) for name, each in values.items()}


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and is_finite(value)  # numbers of other libraries too, and no text


def _entries(answer: Any) -> list[Any]:
    """Return one entry per sample; none of an answer whose order is not that of the samples: a mapping, a set, a text."""
    ordered = isinstance(answer, Iterable) and not isinstance(answer, Mapping | Set | str | bytes)
    return list(answer) if ordered else []


def _reward_and_metrics(entry: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split the entry of a sample: a number, or a mapping of reward and metrics.

    Raises:
        StageError: the metrics have no names.
    """
    if not isinstance(entry, Mapping):
        return entry, {}
    metrics = entry.get("metrics")
    if not isinstance(metrics, Mapping | None):
        raise StageError(f"The reward function ({SETTING}) returned the metrics {metrics!r:.80}, no dict of numbers.")
    return entry.get("reward"), metrics or {}


def _with_reward(sample: Sample, reward: float) -> Sample:
    # Backwards: the reward belongs on the last token of the last sequence that has a response.
    sequences: list[RolloutSequence] = []
    for sequence in reversed(sample.sequences):
        rewards = np.zeros(len(sequence.reward_array))
        if len(rewards):
            rewards[-1], reward = reward, 0.0
        sequences.append(replace(sequence, reward_array=rewards))
    return Sample(tuple(reversed(sequences)))
