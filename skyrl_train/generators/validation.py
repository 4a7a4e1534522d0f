"""The boundary between generators and training: checks a generator's output field by field, then converts it.

It rejects everything that training would silently learn wrongly from: missing or impossible log-probs, tokens without a
version, ragged lists, numbers that are not finite. Each message names the field and the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from operator import countOf
from typing import Any, NoReturn

import numpy as np

from skyrl_train.errors import GeneratorOutputError, NonFiniteRewardError
from skyrl_train.inference.interface import StopReason
from skyrl_train.types import GeneratorOutput, RolloutSequence, Sample, packed

# A log-prob is at most 0. Engines that compute it in a low precision exceed that by rounding only.
MAX_LOGPROB = 1e-3
MAX_TOKEN_ID = 2**31 - 1
MAX_REWARD = float(np.finfo(np.float32).max)  # advantages are computed in float32
MAX_VERSION = 2**63 - 1  # of an int64 array

_REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_versions")
_ALIGNED = ("loss_masks", "rollout_logprobs", "rollout_versions")  # with response_ids, token by token
_OPTIONAL = ("stop_reasons", "trajectory_ids", "is_last_step", "rollout_grammars")
_ADVICE = {
    "rollout_logprobs": "Pass the client's response_logprobs through, with 0.0 where the loss mask is 0.",
    "rollout_versions": "Pass the client's response_versions through, with -1 where the loss mask is 0.",
}


def to_samples(output: GeneratorOutput, expected: int) -> tuple[Sample, ...]:
    """Check that ``output`` has ``expected`` trajectories and keeps the contract of :class:`GeneratorOutput`; convert it.

    A response may be empty, and may have no token to train on (an all-zero mask); a prompt may not be empty. A reward for
    the whole response goes to its last token; for an empty response it is dropped. Where the loss mask is 0, log-probs
    become 0.0 and versions -1, because a token that is not trained must not age its group.

    Messages name samples, or rows where ``is_last_step`` gives a trajectory several rows.

    Returns:
        One sample per trajectory, in the order of their rows. ``output`` is not changed.

    Raises:
        GeneratorOutputError: the first violation.
        NonFiniteRewardError: a reward is NaN or infinite, also as float32. That is a fault of this rollout, not of the
            generator.
    """
    if not isinstance(output, Mapping):
        raise GeneratorOutputError(f"The generator returned a {type(output).__name__}, not a GeneratorOutput (a dict).")
    fields: dict[str, Any] = dict(output)
    is_last = fields.get("is_last_step")
    rows = len(is_last) if isinstance(is_last, list | tuple) and not all(is_last) else expected
    unit = f"{expected} trajectories" if rows == expected else f"the {rows} rows of is_last_step"
    for name in (*_REQUIRED, *(name for name in _OPTIONAL if fields.get(name) is not None)):
        value = fields.get(name)
        if value is None:
            raise GeneratorOutputError(f"{name} is missing. {_ADVICE.get(name, 'A generator must return it.')}")
        if not isinstance(value, list | tuple):
            raise GeneratorOutputError(f"{name} is a {type(value).__name__}, not a list with one entry per trajectory.")
        if len(value) != rows:
            raise GeneratorOutputError(f"{name} has {len(value)} entries for {unit}; a group must stay whole.")
    # The client continues aborted responses, so an abort here is an unfinished response.
    for row, reason in enumerate(fields.get("stop_reasons") or ()):
        if not isinstance(reason, str) or reason == StopReason.ABORT:
            _fail(fields, "stop_reasons", row, f"is {reason!r}; give the reason why the response ended, never 'abort'.")
    _check_trajectories(fields, expected)

    stop_reasons = fields.get("stop_reasons") or [StopReason.STOP.value] * rows
    samples: list[Sample] = []
    sequences: list[RolloutSequence] = []  # of the trajectory under construction
    for row in range(rows):
        sequences.append(_to_sequence(fields, row, str(stop_reasons[row])))
        if not is_last or is_last[row]:
            samples.append(Sample(tuple(sequences)))
            sequences = []
    return tuple(samples)


def _check_trajectories(fields: Mapping[str, Any], expected: int) -> None:
    """Check that the rows of a trajectory are adjacent, that its last row is marked, and that all trajectories are there."""
    ids, is_last = fields.get("trajectory_ids"), fields.get("is_last_step")
    for row, value in enumerate(is_last or ()):
        if not isinstance(value, bool):
            _fail(fields, "is_last_step", row, f"is {value!r}; it must be True on a trajectory's last row, else False.")
    if ids is None:
        if is_last and not all(is_last):
            row = is_last.index(False)
            _fail(fields, "is_last_step", row, "is False, but trajectory_ids does not say whose row it is.")
        return
    # Rows of one trajectory are adjacent, so an id that returns after its last row is a repetition.
    ended: set[Any] = set()
    for row, trajectory_id in enumerate(ids):
        if trajectory_id in ended:
            _fail(fields, "trajectory_ids", row, f"repeats {trajectory_id!r}; each trajectory must come back once.")
        if is_last is None or is_last[row]:
            ended.add(trajectory_id)
        elif row + 1 == len(ids) or ids[row + 1] != trajectory_id:
            _fail(fields, "is_last_step", row, "is False, but the next row is not the same trajectory's.")
    if len(ended) != expected:
        raise GeneratorOutputError(
            f"is_last_step is True on {len(ended)} rows for {expected} trajectories; a group must stay whole."
        )


# One row --------------------------------------------------------------------------------------------------------------


def _to_sequence(fields: Mapping[str, Any], row: int, stop_reason: str) -> RolloutSequence:
    try:
        sequence = _convert_arrays(fields, row, stop_reason)
    except (TypeError, ValueError, OverflowError):  # a value that no array holds
        sequence = None
    if sequence is None:
        # The slow check finds the first violation and names its position.
        _check_row(fields, row)
        # Valid after all, for example with numpy scalars.
        response, rewards = fields["response_ids"][row], fields["rewards"][row]
        if isinstance(rewards, Real):
            rewards = [0.0] * (len(response) - 1) + [rewards] if response else []
        sequence = RolloutSequence.of_lists(
            prompt_token_ids=[int(value) for value in fields["prompt_token_ids"][row]],
            response_ids=[int(value) for value in response],
            loss_mask=[int(value) for value in fields["loss_masks"][row]],
            logprobs=[float(value) for value in fields["rollout_logprobs"][row]],
            versions=[int(value) for value in fields["rollout_versions"][row]],
            rewards=[float(value) for value in rewards],
            stop_reason=stop_reason,
        )
    if grammars := fields.get("rollout_grammars"):
        if not all(0 <= span.start < span.stop <= sequence.num_response_tokens for span in grammars[row]):
            _fail(fields, "rollout_grammars", row, "has a span that is not within the response.")
        sequence = replace(sequence, grammars=tuple(grammars[row]))
    if sequence.sampled.all():
        return sequence
    untrained = ~sequence.sampled
    if sequence.logprob_array[untrained].any() or (sequence.version_array[untrained] != -1).any():
        sequence = replace(
            sequence,
            logprob_array=np.where(untrained, 0.0, sequence.logprob_array),
            version_array=np.where(untrained, -1, sequence.version_array),
        )
    return sequence


def _convert_arrays(fields: Mapping[str, Any], row: int, stop_reason: str) -> RolloutSequence | None:
    """Convert a row if whole-array checks show that it keeps the contract; return None where each number must be checked.

    Every token of a run passes here, on the control loop, so this path has no Python loop over tokens.

    Raises:
        TypeError, ValueError, OverflowError: the same as None.
    """
    prompt, response, mask, logprobs, versions, reward = (
        fields[name][row] for name in ("prompt_token_ids", "response_ids", *_ALIGNED, "rewards")
    )
    length = len(response)
    if not all(isinstance(each, list | tuple) and len(each) == length for each in (response, mask, logprobs, versions)):
        return None
    if not isinstance(prompt, list | tuple) or not prompt:
        return None
    # Most rewards are floats, and a look at the type is cheaper than to ask an abstract class.
    whole = type(reward) is float or isinstance(reward, Real)
    first = fields["rewards"][0]
    if whole != (type(first) is float or isinstance(first, Real)):
        return None
    if whole:
        if not is_finite(reward):
            return None
        rewards = np.zeros(length)
        rewards[-1:] = reward  # an empty response has no place for it
    else:
        if not isinstance(reward, list | tuple) or len(reward) != length:
            return None
        rewards = packed("d", reward)
        if not np.abs(rewards).sum() <= MAX_REWARD:  # False for NaN
            return None
    tokens, version_array, logprob_array = _integers([*prompt, *response]), _integers(versions), packed("d", logprobs)
    flags = bytearray(mask)
    num_trained = flags.count(1)
    if tokens is None or version_array is None or num_trained + flags.count(0) != length:
        return None
    sampled = np.frombuffer(flags, np.bool_)
    trained = slice(None) if num_trained == length else sampled  # a slice makes no copy
    # Few calls of numpy: for short responses they are most of the time. A NaN makes each comparison false.
    valid = (
        tokens.view(np.uint64).max() <= MAX_TOKEN_ID  # a negative number is a large one there
        and logprob_array.min(initial=0.0) > -np.inf
        and logprob_array[trained].max(initial=0.0) <= MAX_LOGPROB
        and version_array[trained].min(initial=0) >= 0
    )
    if num_trained != length:
        valid = valid and logprob_array.max(initial=0.0) < np.inf and version_array.min(initial=0) >= -1
    if not valid:
        return None
    return RolloutSequence(
        token_array=tokens,
        sampled=sampled,
        logprob_array=logprob_array,
        version_array=version_array,
        reward_array=rewards,
        stop_reason=stop_reason,
    )


def _integers(values: list[Any] | tuple[Any, ...]) -> np.ndarray | None:
    """Return an int64 array, or None where bools pass for 0 and 1."""
    integers = packed("q", values)
    may_have_bools = len(values) < 100 or (integers.view(np.uint64) <= 1).any()
    if may_have_bools and countOf(map(type, values), bool):
        return None
    return integers


def _check_row(fields: Mapping[str, Any], row: int) -> None:
    """Raise the first violation of a row, number by number."""
    for name in ("prompt_token_ids", "response_ids", *_ALIGNED):
        value = fields[name][row]
        if not isinstance(value, list | tuple):
            _fail(fields, name, row, f"is a {type(value).__name__}, not a list.")
    if len(fields["prompt_token_ids"][row]) == 0:
        _fail(fields, "prompt_token_ids", row, "is empty; a response needs something to respond to.")
    for name in ("prompt_token_ids", "response_ids"):
        for position, token in enumerate(fields[name][row]):
            if not _is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
                problem = f"has {token!r} at position {position}; token ids are integers from 0 to 2**31 - 1."
                _fail(fields, name, row, problem)
    length = len(fields["response_ids"][row])
    for name in _ALIGNED:
        if len(fields[name][row]) != length:
            _fail(fields, name, row, f"has {len(fields[name][row])} entries for {length} response tokens.")

    reward = fields["rewards"][row]
    per_token = not isinstance(reward, Real)
    if per_token == isinstance(fields["rewards"][0], Real):
        _fail(fields, "rewards", row, "mixes rewards per response and per token; give one kind.")
    if per_token and not isinstance(reward, list | tuple):
        _fail(fields, "rewards", row, f"is a {type(reward).__name__}, not a list.")
    if per_token and len(reward) != length:
        _fail(fields, "rewards", row, f"has {len(reward)} entries for {length} response tokens.")
    for value in reward if per_token else (reward,):
        if not isinstance(value, Real):
            _fail(fields, "rewards", row, f"contains {value!r}; rewards must be finite numbers.")
        if not is_finite(value):
            raise NonFiniteRewardError(
                f"rewards of {_whose(fields, row)} contains {value!r}; rewards must be finite numbers. Check the environment or "
                "the reward function."
            )
    if per_token and not is_finite(sum(abs(float(value)) for value in reward)):
        raise NonFiniteRewardError(f"the rewards of {_whose(fields, row)} add up to more than a float32 holds.")

    for position, (mask, logprob, version) in enumerate(zip(*(fields[name][row] for name in _ALIGNED), strict=True)):
        if not isinstance(mask, Real) or mask not in (0, 1):
            _fail(fields, "loss_masks", row, f"has {mask!r} at position {position}; it must be 0 or 1.")
        if not isinstance(logprob, Real) or not is_finite(logprob):
            _fail(fields, "rollout_logprobs", row, f"has {logprob!r} at position {position}; log-probs must be finite.")
        if not _is_int(version) or not -1 <= version <= MAX_VERSION:
            _fail(fields, "rollout_versions", row, f"has {version!r} at position {position}; give an integer >= -1.")
        if mask and float(logprob) > MAX_LOGPROB:
            _fail(fields, "rollout_logprobs", row, f"has {logprob!r} at position {position}; a log-prob is at most 0.")
        if mask and version < 0:
            problem = f"has {version!r} at position {position}, a token to train on. {_ADVICE['rollout_versions']}"
            _fail(fields, "rollout_versions", row, problem)


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_finite(value: Any) -> bool:
    """Return whether a number is finite, also as float32."""
    try:
        return abs(float(value)) <= MAX_REWARD
    except OverflowError:  # an integer beyond all floats
        return False


def _fail(fields: Mapping[str, Any], name: str, row: int, problem: str) -> NoReturn:
    raise GeneratorOutputError(f"{name} of {_whose(fields, row)} {problem}")


def _whose(fields: Mapping[str, Any], row: int) -> str:
    ids, is_last = fields.get("trajectory_ids"), fields.get("is_last_step")
    if not is_last or all(is_last):
        return f"sample {row}"
    return f"row {row} (trajectory {ids[row]!r})" if ids else f"row {row}"
