"""The boundary between generators and training: what a generator returns is checked field by field, then converted.

Anything that training would silently learn from wrongly is refused here: missing or impossible log-probs, tokens
without a version, ragged lists, numbers that are not finite. The message names the field and the sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from skyrl_train.errors import GeneratorOutputError
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.inference.interface import StopReason
from skyrl_train.rollout.group import Sample

# A log-prob is at most 0; engines that compute it in a low precision overshoot by rounding only.
MAX_LOGPROB = 1e-3

_REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_versions")
_ALIGNED = ("loss_masks", "rollout_logprobs", "rollout_versions")
_ADVICE = {
    "rollout_logprobs": "Pass the client's response_logprobs through, with 0.0 where the loss mask is 0.",
    "rollout_versions": "Pass the client's response_versions through, with -1 where the loss mask is 0.",
}


def validate_generator_output(output: GeneratorOutput, expected: int) -> None:
    """Checks that ``output`` has ``expected`` trajectories and keeps the contract of :class:`GeneratorOutput`.

    A response may be empty, and may have no token to train on (an all-zero mask); a prompt may not.

    Raises:
        GeneratorOutputError: the first violation found.
    """
    if not isinstance(output, Mapping):
        raise GeneratorOutputError(f"The generator returned a {type(output).__name__}, not a GeneratorOutput (a dict).")
    fields: dict[str, Any] = dict(output)
    for name in _REQUIRED:
        _check_list(fields.get(name), name, expected)
    _check_optional(fields, expected)
    for sample in range(expected):
        _check_tokens(fields, sample)
        _check_rewards(fields, sample)
        _check_sampled(fields, sample)


def to_samples(output: GeneratorOutput) -> tuple[Sample, ...]:
    """Converts a validated output.

    A reward for the whole response goes to its last token (an empty response has nowhere to keep one). Where the loss
    mask is 0, log-probs become 0.0 and versions -1: a token that is not trained must not age its group.
    """
    fields: dict[str, Any] = dict(output)
    stop_reasons = fields.get("stop_reasons") or [StopReason.STOP.value] * len(fields["response_ids"])
    return tuple(_to_sample(fields, sample, str(reason)) for sample, reason in enumerate(stop_reasons))


def _to_sample(fields: Mapping[str, Any], sample: int, stop_reason: str) -> Sample:
    response_ids = [int(token) for token in fields["response_ids"][sample]]
    mask = [int(value) for value in fields["loss_masks"][sample]]
    rewards = fields["rewards"][sample]
    if isinstance(rewards, Real):
        rewards = [0.0] * (len(response_ids) - 1) + [rewards] if response_ids else []
    return Sample(
        prompt_token_ids=[int(token) for token in fields["prompt_token_ids"][sample]],
        response_ids=response_ids,
        loss_mask=mask,
        logprobs=[float(v) if m else 0.0 for v, m in zip(fields["rollout_logprobs"][sample], mask, strict=True)],
        versions=[int(v) if m else -1 for v, m in zip(fields["rollout_versions"][sample], mask, strict=True)],
        rewards=[float(reward) for reward in rewards],
        stop_reason=stop_reason,
    )


def _check_list(value: Any, name: str, expected: int) -> None:
    if value is None:
        raise GeneratorOutputError(f"{name} is missing. {_ADVICE.get(name, 'A generator must return it.')}")
    if not isinstance(value, list | tuple):
        raise GeneratorOutputError(f"{name} is a {type(value).__name__}, not a list with one entry per trajectory.")
    if len(value) != expected:
        raise GeneratorOutputError(
            f"{name} has {len(value)} entries for {expected} trajectories; a group must stay whole."
        )


def _check_optional(fields: Mapping[str, Any], expected: int) -> None:
    for name in ("stop_reasons", "trajectory_ids", "is_last_step"):
        if fields.get(name) is not None:
            _check_list(fields[name], name, expected)
    for sample, reason in enumerate(fields.get("stop_reasons") or ()):
        if not isinstance(reason, str) or reason == StopReason.ABORT:
            _fail("stop_reasons", sample, f"is {reason!r}; give the reason why the response ended, never 'abort'.")
    seen: set[Any] = set()
    for sample, trajectory_id in enumerate(fields.get("trajectory_ids") or ()):
        if trajectory_id in seen:
            _fail("trajectory_ids", sample, f"repeats {trajectory_id!r}; each trajectory must come back once.")
        seen.add(trajectory_id)
    for sample, is_last in enumerate(fields.get("is_last_step") or ()):
        if is_last is not True:
            _fail("is_last_step", sample, "is not True; return whole trajectories, not their single steps.")


def _check_tokens(fields: Mapping[str, Any], sample: int) -> None:
    if len(_sequence(fields, "prompt_token_ids", sample)) == 0:
        _fail("prompt_token_ids", sample, "is empty; a response needs something to respond to.")
    for name in ("prompt_token_ids", "response_ids"):
        for position, token in enumerate(_sequence(fields, name, sample)):
            if not _is_int(token) or token < 0:
                _fail(name, sample, f"has {token!r} at position {position}; token ids are integers >= 0.")
    length = len(fields["response_ids"][sample])
    for name in _ALIGNED:
        count = len(_sequence(fields, name, sample))
        if count != length:
            _fail(name, sample, f"has {count} entries for {length} response tokens.")


def _check_rewards(fields: Mapping[str, Any], sample: int) -> None:
    reward = fields["rewards"][sample]
    per_token = not isinstance(reward, Real)
    if per_token != (not isinstance(fields["rewards"][0], Real)):
        _fail("rewards", sample, "mixes rewards per response and per token; give one kind.")
    if per_token:
        length, count = len(fields["response_ids"][sample]), len(_sequence(fields, "rewards", sample))
        if count != length:
            _fail("rewards", sample, f"has {count} entries for {length} response tokens.")
    for value in reward if per_token else (reward,):
        if not isinstance(value, Real) or not math.isfinite(value):
            _fail("rewards", sample, f"contains {value!r}; rewards must be finite numbers.")


def _check_sampled(fields: Mapping[str, Any], sample: int) -> None:
    for position, (mask, logprob, version) in enumerate(_aligned(fields, sample)):
        if not isinstance(mask, Real) or mask not in (0, 1):
            _fail("loss_masks", sample, f"has {mask!r} at position {position}; it must be 0 or 1.")
        if not isinstance(logprob, Real) or not math.isfinite(logprob):
            _fail("rollout_logprobs", sample, f"has {logprob!r} at position {position}; log-probs must be finite.")
        if not _is_int(version) or version < -1:
            _fail("rollout_versions", sample, f"has {version!r} at position {position}; give an integer >= -1.")
        if mask and logprob > MAX_LOGPROB:
            _fail("rollout_logprobs", sample, f"has {logprob!r} at position {position}; a log-prob is at most 0.")
        if mask and version < 0:
            advice = _ADVICE["rollout_versions"]
            _fail("rollout_versions", sample, f"has {version!r} at position {position}, a token to train on. {advice}")


def _aligned(fields: Mapping[str, Any], sample: int) -> Iterator[tuple[Any, Any, Any]]:
    masks, logprobs, versions = (fields[name][sample] for name in _ALIGNED)
    return zip(masks, logprobs, versions, strict=True)


def _sequence(fields: Mapping[str, Any], name: str, sample: int) -> Sequence[Any]:
    value = fields[name][sample]
    if not isinstance(value, list | tuple):
        _fail(name, sample, f"is a {type(value).__name__}, not a list.")
    return value  # type: ignore[no-any-return]


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _fail(name: str, sample: int, what: str) -> None:
    raise GeneratorOutputError(f"{name} of sample {sample} {what}")
