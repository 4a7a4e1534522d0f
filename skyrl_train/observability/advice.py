"""Alarms and tuning advice: what is wrong with a run, and which setting changes it.

    metrics.jsonl ──first and last rows──┐
    events/ ───────failed attempts───────┼──advise──> alarms; if there are none, tuning advice
    config.yaml ───settings──────────────┘               └──AdviceHistory──> begun, ended

A rule is a pure function of the last steps. Its name is the id of its advice, and the title of a section in
docs/tutorials/troubleshooting.md. Thresholds are constants, because a run that needs another one needs another rule.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from skyrl_train.observability.failures import sentence
from skyrl_train.observability.readers.settings import setting_of

T = TypeVar("T")
Row: TypeAlias = Mapping[str, Any]  # of metrics.jsonl

DOCS = "docs/tutorials/troubleshooting.md"
FIRST_STEPS, LAST_STEPS = 5, 10
FAILURES = ("failed", "retried")  # kinds of events
FAILURE_SEGMENTS = 4  # newest segments of the record, of 4 MiB each: the failures of ten steps are in them
# Advice ends when it was not found for this many steps: a figure near its threshold crosses it often.
HOLD_STEPS = 10


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to change about a run.

    Attributes:
        level: "alarm": something is wrong. "tuning": the run could be faster or learn from more of its samples.
        finding: one sentence with the figure.
        action: one sentence that says what to do.
    """

    id: str
    level: Literal["alarm", "tuning"]
    finding: str
    action: str

    @property
    def docs(self) -> str:
        """The section of the documentation about it."""
        return f"{DOCS}#{self.id}"

    def __str__(self) -> str:
        return f"{self.level}: {self.finding} {self.action} ({self.docs})"


def edge_rows(rows: Iterable[T]) -> list[T]:
    """Return the first and the last rows of a run, or their positions: all that :func:`advise` reads."""
    rows = iter(rows)
    return [*itertools.islice(rows, FIRST_STEPS), *deque(rows, maxlen=LAST_STEPS)]


def advise(rows: Sequence[Row], failures: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Advice]:
    """Return the alarms of a run, the most urgent first, or, without any, its tuning advice. Never raises.

    Args:
        rows: in the order of steps, see :func:`edge_rows`.
        failures: events of the kinds ``FAILURES``, oldest first.
        settings: of ``config.yaml`` as plain data; a missing one counts as its default.
    """
    run = LastSteps(rows, failures, settings)
    levels: tuple[tuple[Literal["alarm", "tuning"], Sequence[Rule]], ...] = (("alarm", ALARMS), ("tuning", TUNING))
    for level, rules in levels:
        found = [(rule.__name__.replace("_", "-"), rule(run)) for rule in rules]
        advice = [Advice(name, level, *sentences) for name, sentences in found if sentences is not None]
        if advice:
            return advice
    return []


class AdviceHistory:
    """Tells which advice begins and ends from one step to the next."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Advice, int]] = {}  # with the last step at which it was found

    def update(self, step: int, found: Sequence[Advice]) -> tuple[list[Advice], list[Advice]]:
        """Return the advice that begins at ``step``, and the advice that ends: it was not found for ``HOLD_STEPS`` steps."""
        begun = [advice for advice in found if advice.id not in self._open]
        self._open |= {advice.id: (advice, step) for advice in found}
        ended = [advice for advice, last in self._open.values() if step - last >= HOLD_STEPS]
        for advice in ended:
            del self._open[advice.id]
        return begun, ended


class LastSteps:
    """The figures of a run's last steps. A figure that is missing or not finite is NaN, which exceeds no threshold."""

    def __init__(self, rows: Sequence[Row], failures: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
        self._rows = rows
        self._settings = settings
        self.recent = rows[-LAST_STEPS:]
        # Statistics over fewer steps would be noise.
        self._last = self.recent if len(rows) >= LAST_STEPS else []
        since = (
            _number(self._last[0].get("time")) - _number(self._last[0].get("time/step")) if self._last else -math.inf
        )
        self.failures = [str(event.get("reason")) for event in failures if not _number(event.get("t")) < since]

    def each(self, name: str, steps: int = LAST_STEPS) -> list[float]:
        """Return the metric in each of the last steps; one NaN if it has had fewer steps."""
        rows = self._rows[-steps:] if len(self._rows) >= steps else [{}]
        return [_number(row.get(name)) for row in rows]

    def lowest(self, name: str, steps: int = LAST_STEPS) -> float:
        """Return the smallest of the last values; NaN if one is missing."""
        return min(self.each(name, steps), key=lambda value: (not math.isnan(value), value))

    def highest(self, name: str, steps: int = LAST_STEPS) -> float:
        """Return the largest of the last values; NaN if one is missing."""
        return max(self.each(name, steps), key=lambda value: (math.isnan(value), value))

    def mean(self, name: str) -> float:
        """Return the mean over the last steps that have the metric."""
        return _mean([_number(row.get(name)) for row in self._last])

    def mean_at_start(self, name: str) -> float:
        """Return the mean over the first steps of the run."""
        return _mean([_number(row.get(name)) for row in self._rows[:FIRST_STEPS]])

    def newest(self, name: str) -> float:
        """Return the last value that is known; NaN if there is none."""
        values = [_number(row.get(name)) for row in self._rows]
        return next((value for value in reversed(values) if not math.isnan(value)), math.nan)

    def growth(self, name: str) -> float:
        """Return by how much a total rose over the last steps. A process that resumes may begin to count anew."""
        values = [value for row in self.recent if not math.isnan(value := _number(row.get(name)))]
        return sum(max(0.0, after - before) for before, after in itertools.pairwise(values))

    def share_of_time(self, *names: str) -> float:
        """Return the share of the last steps' time that the named activities took together. A step that lacks one, as one without
        a weight sync does, has spent no time on it; NaN if all steps lack all of them."""
        spent = [
            seconds
            for name in names
            for row in self._last
            if not math.isnan(seconds := _number(row.get(f"time/{name}")))
        ]
        steps_s = sum(seconds for row in self._last if not math.isnan(seconds := _number(row.get("time/step"))))
        return sum(spent) / steps_s if spent and steps_s > 0 else math.nan

    def setting(self, key: str, default: Any) -> Any:
        """Return a setting by its dotted name."""
        value = setting_of(self._settings, key)
        return default if value is None else value

    @property
    def constant_reward(self) -> float:
        """The reward that every sample of the last ``CONSTANT_STEPS`` steps had; NaN if they differ."""
        low, high = self.lowest("reward/min", CONSTANT_STEPS), self.highest("reward/max", CONSTANT_STEPS)
        return low if low == high else math.nan

    @property
    def has_learned(self) -> bool:
        """Whether the mean reward has come more than halfway from its start to the best sample's. Then groups with equal
        rewards and a low entropy mean that prompts are solved."""
        start, now, best = self.mean_at_start("reward/mean"), self.mean("reward/mean"), self.highest("reward/max")
        return now > start and now - start > 0.5 * (best - start)


Rule: TypeAlias = Callable[[LastSteps], tuple[str, str] | None]  # returns the finding and the action


# Alarms -----------------------------------------------------------------------------------------------------------


def nonfinite_updates(run: LastSteps) -> tuple[str, str] | None:
    """One is enough: it trained nothing, and the policy may be about to diverge."""
    names = ("policy/skipped_nonfinite", "critic/skipped_nonfinite")
    skipped = sum(any(_number(row.get(name)) > 0 for name in names) for row in run.recent)
    if not skipped:
        return None
    return (
        f"{skipped} of the last {len(run.recent)} steps changed nothing, because their loss or gradient was not finite.",
        "Lower trainer.policy.optimizer_config.lr, and look at the responses and rewards of these steps.",
    )


TOO_LONG = "generator.max_input_length"  # in the reason of a rollout whose prompt is too long


def prompts_too_long(run: LastSteps) -> tuple[str, str] | None:
    """One is enough: the prompt fails in each epoch, after all its retries."""
    number = sum(TOO_LONG in reason for reason in run.failures)
    if not number:
        return None
    return (
        f"{_counted(number, 'attempt')} failed in the last {LAST_STEPS} steps, because a prompt is longer than the context.",
        "Raise generator.max_input_length (and the engines' generator.inference_engine.max_model_len), or remove long "
        "prompts from the data.",
    )


def failing_rollouts(run: LastSteps) -> tuple[str, str] | None:
    """One is enough: code that raises once in many rollouts fails whole groups, whose prompts are then not trained."""
    reasons = [reason for reason in run.failures if TOO_LONG not in reason]
    if not reasons:
        return None
    newest = sentence(reasons[-1])
    return (
        f"{_counted(len(reasons), 'attempt')} failed in the last {LAST_STEPS} steps; the newest: {newest}",
        "logs/trainer.log in the run folder has the traceback of each kind of failure.",
    )


CONSTANT_STEPS = 5  # with rare rewards, a few steps without any are likely


def constant_reward(run: LastSteps) -> tuple[str, str] | None:
    """All advantages are 0 then. A reward function that fails silently looks like this."""
    if math.isnan(run.constant_reward) or run.has_learned:
        return None
    return (
        f"All samples of the last {CONSTANT_STEPS} steps have the reward {run.constant_reward:.3g}: there is nothing to "
        "learn.",
        "Read three responses (the page's samples, or skyrl_train.load_run) and check the code that computes the reward.",
    )


NO_SIGNAL = 0.5  # of the groups; then more samples are generated for nothing than for training


def no_signal(run: LastSteps) -> tuple[str, str] | None:
    """Estimators with a baseline per group learn nothing from a group whose samples have equal rewards."""
    share = run.lowest("reward/zero_variance_groups")
    if not (share > NO_SIGNAL and relative_to_group(run)) or run.has_learned or not math.isnan(run.constant_reward):
        return None
    return (
        f"In each of the last {LAST_STEPS} steps, {at_least(share)} the groups had equal rewards, from which nothing "
        "is learned.",
        "Mix in prompts of other difficulty, raise generator.n_samples_per_prompt, or set "
        "trainer.algorithm.dynamic_sampling=filter.",
    )


def at_least(share: float) -> str:
    return "all" if share == 1 else f"at least {share:.0%} of"


def relative_to_group(run: LastSteps) -> bool:
    """Return whether the advantage of a sample compares it with its group only."""
    return run.setting("trainer.algorithm.advantage_estimator", "grpo") in ("grpo", "rloo", "maxrl")


TRUNCATED = 0.25  # of the samples; an untrained policy that rambles gets below within a few steps


def truncated_responses(run: LastSteps) -> tuple[str, str] | None:
    """A truncated response has no answer, and its reward says little about its tokens."""
    share = run.lowest("generate/truncated")
    if not share > TRUNCATED or run.has_learned:
        return None
    return (
        f"In each of the last {LAST_STEPS} steps, {at_least(share)} the responses were cut off by a length limit.",
        "Raise generator.sampling_params.max_tokens and the engines' context, or check that the model ends its responses.",
    )


# Means over tokens: 1e-6 with the embedded engine in float32, 0.01 to 0.03 where both sides compute in bfloat16 with other
# kernels. Another temperature, template or model is far above.
ENGINE_GAP = 0.05  # nats


def engine_gap(run: LastSteps) -> tuple[str, str] | None:
    """Importance weights then correct for differences that are no staleness."""
    gap = run.newest("off_policy/engine_gap")
    if not gap > ENGINE_GAP:
        return None
    return (
        f"With the same weights, the log-probs of engines and trainer are {gap:.2g} nats apart.",
        "Make the engines' dtype, quantization and model agree with the trainer's (generator.inference_engine.dtype, "
        "engine_args).",
    )


ENTROPY = 0.05  # of the entropy of the first steps; below, the policy samples nearly the same response each time


def entropy_collapse(run: LastSteps) -> tuple[str, str] | None:
    """A policy without entropy explores nothing, so it finds no better responses."""
    entropy, start = run.highest("loss/entropy"), run.mean_at_start("loss/entropy")
    if not (start > 0 and entropy < ENTROPY * start) or run.has_learned:
        return None
    return (
        f"The entropy fell to {entropy:.2g} nats, {entropy / start:.0%} of its start, before the task is solved.",
        "Start again from an earlier checkpoint with a lower trainer.policy.optimizer_config.lr, a higher "
        "trainer.algorithm.eps_clip_high, or trainer.algorithm.entropy_coef.",
    )


ESS = 0.3  # effective sample size; then a third of the tokens have all the weight


def low_effective_sample_size(run: LastSteps) -> tuple[str, str] | None:
    """The policy has moved so far from the one that sampled that few tokens decide the gradient."""
    ess = run.highest("off_policy/ess")
    if not ess < ESS:
        return None
    return (
        f"The effective sample size was at most {ess:.2f} in each of the last {LAST_STEPS} steps: few tokens decide the "
        "gradient.",
        "Lower trainer.fully_async.max_staleness_steps or trainer.policy.optimizer_config.lr.",
    )


DRIFTED = 0.05  # of the turns; a few come from text that has two tokenizations


def rewritten_history(run: LastSteps) -> tuple[str, str] | None:
    """Each rewritten turn begins a new sequence: its prompt is computed again and its tokens are trained twice."""
    share = run.mean("generate/drifted_turns") / (run.mean("generate/turns") or math.nan)
    if not share > DRIFTED:
        return None
    return (
        f"In {share:.0%} of its turns, the agent sent another history than the tokens that it got.",
        "Keep earlier messages unchanged: no date or counter in the system prompt, no trimmed or reordered messages.",
    )


STUCK_FACTOR, STUCK_S = 3.0, 60.0  # longer than the slowest group of the last steps; and short tasks just vary


def stuck_group(run: LastSteps) -> tuple[str, str] | None:
    """It holds a slot, becomes stale, and with some staleness policies training waits for it."""
    oldest, slowest = run.each("generate/latency_s_oldest")[-1], max(run.each("generate/latency_s_p99"), key=_finite)
    if not (oldest > STUCK_S and oldest > STUCK_FACTOR * slowest):
        return None
    return (
        f"A group has been running for {oldest:.0f} s; the slowest one of the last {LAST_STEPS} steps took {slowest:.0f} s.",
        "Give tools and environments time limits, or set trainer.failures.rollout_timeout_s.",
    )


def engine_restarts(run: LastSteps) -> tuple[str, str] | None:
    """One is enough: the run continues, slower, and stops when an engine has died too often."""
    restarts = run.growth("inference/engine_restarts")
    if not restarts:
        return None
    return (
        f"{_counted(restarts, 'engine')} died and restarted in the last {LAST_STEPS} steps.",
        "logs/ in the run folder says why; if memory was full, lower generator.inference_engine.max_num_seqs.",
    )


CHECKPOINTS_LEFT = 2  # a new checkpoint is written before an old one is removed


def full_disk(run: LastSteps) -> tuple[str, str] | None:
    """A checkpoint that cannot be written ends the run."""
    free, size = run.newest("system/disk_free_bytes"), run.newest("system/checkpoint_bytes")
    if not (size > 0 and free < CHECKPOINTS_LEFT * size):
        return None
    return (
        f"The disk has room for {free / size:.1f} more checkpoints ({free / 2**30:.1f} GiB).",
        "Free space, lower trainer.max_ckpts_to_keep, or set trainer.ckpt_path to an object store.",
    )


ALARMS: tuple[Rule, ...] = (
    nonfinite_updates,
    prompts_too_long,
    failing_rollouts,
    constant_reward,
    # Causes before what follows from them: a collapsed policy has groups without signal, and often endless responses.
    engine_gap,
    entropy_collapse,
    no_signal,
    truncated_responses,
    low_effective_sample_size,
    rewritten_history,
    stuck_group,
    engine_restarts,
    full_disk,
)


# Tuning -----------------------------------------------------------------------------------------------------------


def solved_prompts(run: LastSteps) -> tuple[str, str] | None:
    """The counterpart of :func:`no_signal`: the run has learned, and generates mostly answers that it knows."""
    share = run.mean("reward/zero_variance_groups")
    if not (share > NO_SIGNAL and relative_to_group(run) and run.has_learned):
        return None
    return (
        f"{share:.0%} of the groups had equal rewards in the last {LAST_STEPS} steps: most prompts are solved.",
        "Use harder prompts, or trainer.algorithm.dynamic_sampling=filter, so that each step trains on groups with signal.",
    )


BUSY, IDLE = 0.8, 0.4  # shares of the time; below, moving devices gains little


def slow_training(run: LastSteps) -> tuple[str, str] | None:
    """Engines wait for new policies, because training is slower than generation."""
    busy, idle = run.share_of_time("train"), run.mean("async/idle_fraction")
    if not (busy > BUSY and idle > IDLE):
        return None
    return (
        f"Training is the bottleneck: it is busy {busy:.0%} of the time, and {idle:.0%} of the generation slots are idle.",
        "Give training more devices and the engines fewer, or raise trainer.micro_batch_tokens if memory allows.",
    )


WAITS, MOST = 0.3, 0.5  # of the time; below, other work hides most of it; and above, nothing else takes as long
CONTROL = 0.7  # of the time; beyond, requests and groups queue for the control process


def busy_control_process(run: LastSteps) -> tuple[str, str] | None:
    """Training waits for groups, and these wait for the event loop that runs environments and talks to the engines."""
    busy = run.mean("system/control_busy")
    if not (busy > CONTROL and run.share_of_time("wait_for_batch") > WAITS):
        return None
    if not run.setting("rollout.num_actors", 0):
        action = "Move environments and agents to other processes: rollout.num_actors."
    else:
        action = "Environments and agents have processes of their own already: use fewer, longer turns."
    return f"The control process is the bottleneck: its event loop computes {busy:.0%} of the time.", action


QUEUED = 0.25  # waiting by running requests; then engines are never short of work, and more of it would only wait


def slow_generation(run: LastSteps) -> tuple[str, str] | None:
    """Training waits for groups: for engines, for the slowest group, or because nothing is generated ahead."""
    waits, idle = run.share_of_time("wait_for_batch"), run.mean("async/idle_fraction")
    if not waits > WAITS or busy_control_process(run) is not None:
        return None
    running, waiting = run.mean("inference/running_requests"), run.mean("inference/waiting_requests")
    if run.setting("trainer.mode", "sync") in ("sync", "one_step_off", "partial_rollout"):
        action = "Set trainer.mode=fully_async, which generates while it trains."
    elif idle > IDLE and not waiting > QUEUED * running:
        action = (
            "Slots are idle meanwhile, so let generation run further ahead: raise trainer.fully_async.max_staleness_steps "
            "(the lag rises), and leave generate_ahead_steps unset, so that it adapts."
        )
    else:
        action = "Add engines (generator.inference_engine.num_engines), or raise its max_num_seqs."
        if waiting > QUEUED * running:
            action = (
                f"The engines are full: {waiting:.0f} requests wait in them, and {running:.0f} are sampled. {action}"
            )
    finding = f"Training waits for groups {waits:.0%} of the time."
    return f"Generation is the bottleneck. {finding}" if waits > MOST else finding, action


STALE = 0.1  # of the groups


def stale_groups(run: LastSteps) -> tuple[str, str] | None:
    """Tokens beyond the staleness bound are masked, and groups are dropped, after they were paid for."""
    dropped, trained = run.growth("async/dropped"), run.growth("async/trained")
    exceeded = run.mean("staleness/exceeded") * (len(run.recent) - 1)  # as many steps as the totals grew in
    share = (dropped + exceeded) / (dropped + trained) if trained > 0 else math.nan
    if not share > STALE:
        return None
    return (
        f"{share:.0%} of the groups became older than the staleness bound: they were dropped, or their old tokens masked.",
        "Raise trainer.fully_async.max_staleness_steps by 1 or 2, or lower generate_ahead_steps.",
    )


SYNC_SHARE = 0.1  # of the time


def slow_weight_sync(run: LastSteps) -> tuple[str, str] | None:
    """Training and generation wait while weights travel, unless the weight sync overlaps with the next step."""
    waits, evaluates = run.share_of_time("wait_for_weight_sync"), run.share_of_time("wait_for_evaluation")
    share = run.share_of_time("gather", *(("transfer", "pause") if math.isnan(waits) else ("wait_for_weight_sync",)))
    # Training waits for the evaluation on the engines first: the sync begins when it has ended.
    if waits > 0 and evaluates > 0:
        share -= min(waits, evaluates)
    if not share > SYNC_SHARE:
        return None
    depth = run.setting("trainer.fully_async.generate_ahead_steps", 0)
    overlaps_by_default = isinstance(depth, int | float) and depth >= 1  # derive.overlap_weight_sync, without streaming
    overlaps = run.setting("trainer.fully_async.overlap_weight_sync", overlaps_by_default)
    asynchronous = run.setting("trainer.mode", "sync") == "fully_async"
    return (
        f"Training waits for weight syncs {share:.0%} of the time.",
        "Set trainer.fully_async.overlap_weight_sync=true."
        if asynchronous and not overlaps
        else "Choose a faster generator.weight_transport, or sync less often (trainer.fully_async.weight_sync_interval).",
    )


FILL, FEW_PASSES = 0.6, 2  # the last pass of an update takes the rest, so the mean of few passes says little


def underfilled_micro_batches(run: LastSteps) -> tuple[str, str] | None:
    """A pass costs its launches beside its tokens, and padding costs as much as tokens do."""
    fill, passes = run.mean("policy/micro_batch_fill"), run.mean("policy/micro_batches")
    if not (fill < FILL and passes > FEW_PASSES and run.share_of_time("train") > WAITS):
        return None
    if run.setting("trainer.packing", True) is False:
        action = "Leave trainer.packing unset, so that sequences share rows where the model can keep them apart."
    elif run.setting("trainer.fully_async.streaming_min_groups", None) is not None:
        action = "Raise trainer.fully_async.streaming_min_groups, so that each part of a step fills its passes."
    else:
        action = (
            "Raise trainer.micro_batch_tokens if memory allows, so that several of the longest sequences fit together."
        )
    return f"The {passes:.0f} micro-batches of an update are {fill:.0%} full.", action


TUNING: tuple[Rule, ...] = (
    solved_prompts,
    slow_training,
    busy_control_process,
    slow_generation,
    stale_groups,
    slow_weight_sync,
    underfilled_micro_batches,
)


def _number(value: Any) -> float:
    """Return a finite number as a float, and NaN for everything else."""
    if type(value) is float:  # the common case first: this runs some hundred times per step
        return value if math.isfinite(value) else math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _finite(value: float) -> float:
    """The key of a maximum that leaves out NaN."""
    return -math.inf if math.isnan(value) else value


def _counted(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
