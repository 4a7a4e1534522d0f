"""The boundary between generators and training: what a generator returns is checked field by field, then converted.

Anything that training would silently learn from wrongly is refused here: missing or impossible log-probs, tokens
without a version, ragged lists, numbers that are not finite. The message names the field and the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from operator import countOf
from typing import Any

import numpy as np

from skyrl_train.errors import GeneratorOutputError, NonFiniteRewardError
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.inference.interface import StopReason
from skyrl_train.rollout.group import RolloutSequence, Sample, packed

# A log-prob is at most 0; engines that compute it in a low precision overshoot by rounding only.
MAX_LOGPROB = 1e-3
MAX_TOKEN_ID = 2**31 - 1
MAX_REWARD = float(np.finfo(np.float32).max)  # advantages are computed in float32
MAX_VERSION = 2**63 - 1  # what arrays hold

_REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_versions")
_ALIGNED = ("loss_masks", "rollout_logprobs", "rollout_versions")
_ADVICE = {
    "rollout_logprobs": "Pass the client's response_logprobs through, with 0.0 where the loss mask is 0.",
    "rollout_versions": "Pass the client's response_versions through, with -1 where the loss mask is 0.",
}


def to_samples(output: GeneratorOutput, expected: int) -> tuple[Sample, ...]:
    """Checks that ``output`` has ``expected`` trajectories and keeps the contract of :class:`GeneratorOutput`, and converts
    it: one sample per trajectory, in the order of their rows. ``output`` itself stays as it is.

    A response may be empty, and may have no token to train on (an all-zero mask); a prompt may not. A reward for the whole
    response goes to its last token (an empty response has nowhere to keep one). Where the loss mask is 0, log-probs become
    0.0 and versions -1: a token that is not trained must not age its group.

    Messages speak of samples, and of rows where ``is_last_step`` says that a trajectory has several.

    Raises:
        GeneratorOutputError: the first violation found.
        NonFiniteRewardError: a reward is NaN or infinite, or is so in float32, which is not the generator's contract but this
            rollout's fault.
    """
    if not isinstance(output, Mapping):
        raise GeneratorOutputError(f"The generator returned a {type(output).__name__}, not a GeneratorOutput (a dict).")
    fields: dict[str, Any] = dict(output)
    rows = _count_rows(fields, expected)
    whose = f"{expected} trajectories" if rows == expected else f"the {rows} rows of is_last_step"
    for name in _REQUIRED:
        _check_list(fields.get(name), name, rows, whose)
    for name in ("stop_reasons", "trajectory_ids", "is_last_step"):
        if fields.get(name) is not None:
            _check_list(fields[name], name, rows, whose)
    _check_stop_reasons(fields)
    _check_trajectories(fields, expected)
    stop_reasons = fields.get("stop_reasons") or [StopReason.STOP.value] * rows
    is_last = fields.get("is_last_step") or [True] * rows
    samples: list[Sample] = []
    sequences: list[RolloutSequence] = []
    for row in range(rows):
        sequences.append(_to_sequence(fields, row, str(stop_reasons[row])))
        if is_last[row]:
            samples.append(Sample(tuple(sequences)))
            sequences = []
    return tuple(samples)


def _to_sequence(fields: Mapping[str, Any], row: int, stop_reason: str) -> RolloutSequence:
    try:
        sequence = _at_once(fields, row, stop_reason)
    except (TypeError, ValueError, OverflowError):  # something that no array holds
        sequence = None
    if sequence is None:
        _check_tokens(fields, row)
        _check_rewards(fields, row)
        _check_sampled(fields, row)
        sequence = RolloutSequence.of_lists(
            prompt_token_ids=[int(value) for value in fields["prompt_token_ids"][row]],
            response_ids=[int(value) for value in fields["response_ids"][row]],
            loss_mask=[int(value) for value in fields["loss_masks"][row]],
            logprobs=[float(value) for value in fields["rollout_logprobs"][row]],
            versions=[int(value) for value in fields["rollout_versions"][row]],
            rewards=_per_token(fields["rewards"][row], len(fields["response_ids"][row])),
            stop_reason=stop_reason,
        )
    return _without_what_is_not_trained(sequence)


def _at_once(fields: Mapping[str, Any], row: int, stop_reason: str) -> RolloutSequence | None:
    """The row, where its arrays tell that it keeps the contract; None: look at each number.

    Every token of a run passes here, on the control loop, so there is no loop in Python.

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
    rewards = _rewards_at_once(reward, length)
    if rewards is None or isinstance(reward, Real) != isinstance(fields["rewards"][0], Real):
        return None
    ids, of_versions = _integers([*prompt, *response]), _integers(versions)
    masked = np.frombuffer(bytearray(mask), np.uint8)
    if ids is None or of_versions is None or masked.max(initial=0) > 1:
        return None
    sequence = RolloutSequence(
        token_array=ids,
        sampled=masked.view(np.bool_),
        logprob_array=packed("d", logprobs),
        version_array=of_versions,
        reward_array=rewards,
        stop_reason=stop_reason,
    )
    return sequence if _keeps_contract(sequence) else None


def _integers(values: list[Any] | tuple[Any, ...]) -> np.ndarray | None:
    """Int64; None where some are bools, which pass for 0 and 1."""
    integers = packed("q", values)
    if (integers.view(np.uint64) <= 1).any() and countOf(map(type, values), bool):
        return None
    return integers


def _rewards_at_once(reward: Any, length: int) -> np.ndarray | None:
    """Float64 ``[length]``; None where they break the contract."""
    if isinstance(reward, Real):
        if not is_finite(reward):
            return None
        rewards = np.zeros(length)
        rewards[-1:] = reward
        return rewards
    if not isinstance(reward, list | tuple) or len(reward) != length:
        return None
    rewards = packed("d", reward)
    return rewards if np.abs(rewards).sum() <= MAX_REWARD else None


def _keeps_contract(sequence: RolloutSequence) -> bool:
    tokens, logprobs, versions = sequence.token_array, sequence.logprob_array, sequence.version_array
    sampled = slice(None) if sequence.num_sampled == len(versions) else sequence.sampled
    return bool(
        tokens.min() >= 0
        and tokens.max() <= MAX_TOKEN_ID
        and np.isfinite(logprobs).all()
        and logprobs[sampled].max(initial=0.0) <= MAX_LOGPROB
        and versions.min(initial=0) >= -1
        and versions[sampled].min(initial=0) >= 0
    )


def _without_what_is_not_trained(sequence: RolloutSequence) -> RolloutSequence:
    """Log-prob 0.0 and version -1 where the loss mask is 0."""
    if sequence.num_sampled == sequence.num_response_tokens:
        return sequence
    sampled, logprobs, versions = sequence.sampled, sequence.logprob_array, sequence.version_array
    if not (logprobs[~sampled].any() or (versions[~sampled] != -1).any()):
        return sequence
    return replace(
        sequence, logprob_array=np.where(sampled, logprobs, 0.0), version_array=np.where(sampled, versions, -1)
    )


def _per_token(rewards: Any, length: int) -> list[float]:
    """A reward of the whole response goes to its last token; an empty one has nowhere to keep it."""
    if not isinstance(rewards, Real):
        return [float(reward) for reward in rewards]
    return [0.0] * (length - 1) + [float(rewards)] if length else []


def _count_rows(fields: Mapping[str, Any], expected: int) -> int:
    """``expected``, unless a usable ``is_last_step`` says that trajectories have several rows."""
    is_last = fields.get("is_last_step")
    return len(is_last) if isinstance(is_last, list | tuple) and not all(is_last) else expected


def _check_list(value: Any, name: str, rows: int, whose: str) -> None:
    if value is None:
        raise GeneratorOutputError(f"{name} is missing. {_ADVICE.get(name, 'A generator must return it.')}")
    if not isinstance(value, list | tuple):
        raise GeneratorOutputError(f"{name} is a {type(value).__name__}, not a list with one entry per trajectory.")
    if len(value) != rows:
        raise GeneratorOutputError(f"{name} has {len(value)} entries for {whose}; a group must stay whole.")


def _check_stop_reasons(fields: Mapping[str, Any]) -> None:
    for row, reason in enumerate(fields.get("stop_reasons") or ()):
        if not isinstance(reason, str) or reason == StopReason.ABORT:
            _fail(fields, "stop_reasons", row, f"is {reason!r}; give the reason why the response ended, never 'abort'.")


def _check_trajectories(fields: Mapping[str, Any], expected: int) -> None:
    """The rows of a trajectory follow each other, its last one says so, and there are as many as were asked for."""
    ids, is_last = fields.get("trajectory_ids"), fields.get("is_last_step")
    for row, value in enumerate(is_last or ()):
        if not isinstance(value, bool):
            _fail(fields, "is_last_step", row, f"is {value!r}; it must be True on a trajectory's last row, else False.")
    if ids is None:
        if is_last and not all(is_last):
            row = is_last.index(False)
            _fail(fields, "is_last_step", row, "is False, but trajectory_ids does not say whose row it is.")
        return
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


def _check_tokens(fields: Mapping[str, Any], row: int) -> None:
    if len(_sequence(fields, "prompt_token_ids", row)) == 0:
        _fail(fields, "prompt_token_ids", row, "is empty; a response needs something to respond to.")
    for name in ("prompt_token_ids", "response_ids"):
        for position, token in enumerate(_sequence(fields, name, row)):
            if not _is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
                _fail(
                    fields,
                    name,
                    row,
                    f"has {token!r} at position {position}; token ids are integers from 0 to 2**31 - 1.",
                )
    length = len(fields["response_ids"][row])
    for name in _ALIGNED:
        count = len(_sequence(fields, name, row))
        if count != length:
            _fail(fields, name, row, f"has {count} entries for {length} response tokens.")


def _check_rewards(fields: Mapping[str, Any], row: int) -> None:
    reward = fields["rewards"][row]
    per_token = not isinstance(reward, Real)
    if per_token != (not isinstance(fields["rewards"][0], Real)):
        _fail(fields, "rewards", row, "mixes rewards per response and per token; give one kind.")
    if per_token:
        length, count = len(fields["response_ids"][row]), len(_sequence(fields, "rewards", row))
        if count != length:
            _fail(fields, "rewards", row, f"has {count} entries for {length} response tokens.")
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


def _check_sampled(fields: Mapping[str, Any], row: int) -> None:
    for position, (mask, logprob, version) in enumerate(_aligned(fields, row)):
        if not isinstance(mask, Real) or mask not in (0, 1):
            _fail(fields, "loss_masks", row, f"has {mask!r} at position {position}; it must be 0 or 1.")
        if not isinstance(logprob, Real) or not is_finite(logprob):
            _fail(fields, "rollout_logprobs", row, f"has {logprob!r} at position {position}; log-probs must be finite.")
        if not _is_int(version) or not -1 <= version <= MAX_VERSION:
            _fail(fields, "rollout_versions", row, f"has {version!r} at position {position}; give an integer >= -1.")
        if mask and logprob > MAX_LOGPROB:
            _fail(fields, "rollout_logprobs", row, f"has {logprob!r} at position {position}; a log-prob is at most 0.")
        if mask and version < 0:
            advice = _ADVICE["rollout_versions"]
            problem = f"has {version!r} at position {position}, a token to train on. {advice}"
            _fail(fields, "rollout_versions", row, problem)


def _aligned(fields: Mapping[str, Any], row: int) -> Iterator[tuple[Any, Any, Any]]:
    masks, logprobs, versions = (fields[name][row] for name in _ALIGNED)
    return zip(masks, logprobs, versions, strict=True)


def _sequence(fields: Mapping[str, Any], name: str, row: int) -> Sequence[Any]:
    value = fields[name][row]
    if not isinstance(value, list | tuple):
        _fail(fields, name, row, f"is a {type(value).__name__}, not a list.")
    return value  # type: ignore[no-any-return]


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_finite(value: Any) -> bool:
    """Whether a number is finite, also as float32."""
    try:
        return abs(float(value)) <= MAX_REWARD
    except OverflowError:  # an integer beyond all floats
        return False


def _fail(fields: Mapping[str, Any], name: str, row: int, what: str) -> None:
    raise GeneratorOutputError(f"{name} of {_whose(fields, row)} {what}")


def _whose(fields: Mapping[str, Any], row: int) -> str:
    ids, is_last = fields.get("trajectory_ids"), fields.get("is_last_step")
    if not is_last or all(is_last):
        return f"sample {row}"
    return f"row {row} (trajectory {ids[row]!r})" if ids else f"row {row}"
