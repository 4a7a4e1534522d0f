"""A recorded run as a workload: its responses, its speeds and its schedule, so that it can be simulated with other settings.

    events/ requests ──> turns of each response (seconds outside of the engines, tokens)
                     └─> seconds of a decode step = a + b * requests in the batch (least squares)
    metrics.jsonl ─────> seconds of training = c + d * sampled tokens (least squares); seconds of a weight sync

The work beside training (reports, checkpoints) counts as training. Filtered and failed groups are left out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.config import derive
from skyrl_train.errors import ConfigError
from skyrl_train.events.log import EVENTS
from skyrl_train.events.reader import EventReader, Events
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import METRICS, read_jsonl
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.run import Workload
from skyrl_train.simulation.training import TrainingSpeed

if TYPE_CHECKING:
    import pandas

FEWEST_STEPS = 8
_LIFE = ("run", "resume", "lost", "retried", "admitted")
_KINDS = (*_LIFE, "finished", "request")
_ROUNDS = 8  # of the fit: the mean batch of a response depends on the speed


@dataclass(frozen=True)
class MeasuredRun:
    """The last steps of a run. Speeds and figures are measured on the steps between its two outer quarters.

    Attributes:
        workload: its responses and speeds, on its engines.
        settings: its schedule, as overrides.
        trainers: devices that trained.
        engine_devices: of each engine.
        bound: S.
        switch_s: seconds of a step in which engines and trainer gave each other the devices; None: they had their own.
        edge: steps that :func:`skyrl_train.simulation.run.simulate` leaves out at either end for the figures below.
        step_s: seconds per step.
        tokens_per_s: sampled tokens of trained groups per second.
        mean_lag: of groups, by their oldest token.
        training_idle: share of the time in which the trainer computed nothing.
    """

    workload: Workload
    settings: tuple[str, ...]
    trainers: int
    engine_devices: int
    bound: int
    switch_s: float | None
    edge: int
    step_s: float
    tokens_per_s: float
    mean_lag: float
    training_idle: float

    @property
    def devices(self) -> int:
        """Devices in all."""
        engines = self.workload.engines * self.engine_devices
        return engines + self.trainers if self.switch_s is None else max(engines, self.trainers)


def measure_run(folder: Path, steps: int) -> MeasuredRun:
    """Measure the last ``steps`` steps of the run in ``folder``, or all of them if it has fewer.

    Raises:
        ConfigError: this is no run, or its record is too short or has no requests.
    """
    run = load_run(folder)
    config = run.config
    bound = config.trainer.fully_async.max_staleness_steps
    finished = (row for row in read_jsonl(folder / METRICS) if row.get("time/step") and row.get("group_indices"))
    # A run may have a hundred thousand steps. Groups were admitted up to S steps before they trained.
    kept = list(deque(finished, maxlen=steps + bound + 1))
    rows = kept[-steps:]
    if len(rows) < FEWEST_STEPS:
        raise ConfigError(
            f"{folder} has {len(rows)} finished steps, and the simulation of a run needs {FEWEST_STEPS}. Train it for longer."
        )
    samples, engine = config.generator.n_samples_per_prompt, config.generator.inference_engine
    began = rows[0]["time"] - rows[0]["time/step"]
    groups = sorted({group for row in rows for group in row["group_indices"]})
    recorded = EventReader(folder / EVENTS, since=kept[0]["time"] - kept[0]["time/step"]).poll(_KINDS)
    trained = set(groups)
    # The responses of the steps, and all others that were in the engines' batches meanwhile.
    events = Events(
        [each for each in recorded if each["kind"] in _LIFE or each["group"] in trained or each["t"] > began]
    )
    turns = _turns(events, groups)
    turns = {group: each for group, each in turns.items() if len(each) == samples}
    if not turns:
        raise ConfigError(
            f"{folder} has recorded no requests of its last {len(rows)} steps (trainer.max_events_per_s=0, or rollout actors), "
            "so their lengths and the engines' speed are unknown."
        )
    segments = events.segments()
    # The limit of recorded events leaves out whole groups; the batches had their requests too.
    recorded_share = len(turns) / len(groups)
    # Speeds and figures are of the same steps: a machine with other work is not equally fast all the time.
    edge = len(rows) // 4
    steady = rows[edge : len(rows) - edge]
    since, until = steady[0]["time"] - steady[0]["time/step"], steady[-1]["time"]
    *speed, way_s = _decode_speed(segments, engine.max_num_seqs, recorded_share, since, until)
    # A group without a record is like the one before it: lengths change while the policy learns.
    known = sorted(turns)
    responses = [
        [(wait_s + way_s if tokens else wait_s, tokens) for wait_s, tokens in response]
        for group in groups
        for response in turns[known[max(0, bisect_right(known, group) - 1)]]
    ]

    def column(name: str) -> NDArray[np.float64]:
        return np.array([row.get(name) or 0.0 for row in steady])

    def mean_of_syncs(name: str) -> float:
        values = [row[name] for row in steady if name in row]
        return float(np.mean(values)) if values else 0.0

    turns_of_step = ("time/sleep", "time/reload_states", "time/wake_up", "time/offload_states")
    switches = np.sum([column(name) for name in turns_of_step], axis=0)
    outside = column("time/wait_for_batch") + column("time/gather") + column("time/wait_for_weight_sync") + switches
    if "time/wake_up" in steady[0]:  # the trainer waits for the weight sync without measuring it once more
        outside += column("time/transfer") + column("time/pause")
    tokens = column("generate/response_tokens") * config.trainer.policy_mini_batch_size * samples
    busy_s = np.maximum(0.0, column("time/step") - outside)
    per_step_s, per_token_s = _least_squares(np.stack([np.ones(len(steady)), tokens], axis=1), busy_s)
    steady_s = column("time/step").sum()
    switch_s = float(np.mean(switches)) if config.trainer.placement.colocate_all else None
    workload = Workload(
        lengths=Lengths("recorded", np.array([sum(tokens for _, tokens in response) for response in responses])),
        batch_groups=config.trainer.policy_mini_batch_size,
        steps=len(rows),
        engine=EngineSpeed(
            slots=engine.max_num_seqs,
            step_s=speed[0],
            step_per_request_s=speed[1],
            prefill_steps_per_token=speed[2],
            transfer_s=mean_of_syncs("time/transfer"),
            load_s=mean_of_syncs("time/pause"),
            sleep_s=(switch_s or 0.0) / 2,
        ),
        training=TrainingSpeed(per_step_s, per_token_s, mean_of_syncs("time/gather")),
        engines=engine.num_engines,
        samples=samples,
        turns=responses,
    )
    return MeasuredRun(
        workload=workload,
        settings=_schedule(config),
        trainers=config.trainer.fsdp.num_workers if config.trainer.strategy == "fsdp2" else 1,
        engine_devices=max(1, derive.engine_num_gpus(engine)),
        bound=bound,
        switch_s=switch_s,
        edge=edge,
        step_s=float(steady_s / len(steady)),
        tokens_per_s=float(tokens.sum() / steady_s),
        mean_lag=float(column("staleness/mean").mean()),
        training_idle=float(1 - busy_s.sum() / steady_s),
    )


def _schedule(config: Any) -> tuple[str, ...]:
    """Return the settings of a run that decide when something is generated and trained."""
    trainer = config.trainer
    values: dict[str, Any] = {
        "trainer.mode": str(trainer.mode),
        "generator.pause_mode": str(config.generator.pause_mode),
    }
    values |= {f"trainer.fully_async.{name}": value for name, value in asdict(trainer.fully_async).items()}
    values |= {f"trainer.partial_rollout.{name}": value for name, value in asdict(trainer.partial_rollout).items()}
    values["trainer.train_batch_size"] = trainer.train_batch_size
    values["trainer.placement.colocate_all"] = trainer.placement.colocate_all
    return tuple(f"{name}={'null' if value is None else value}" for name, value in values.items())


# Requests ------------------------------------------------------------------------------------------------------------


def _turns(events: Events, groups: Sequence[int]) -> dict[int, list[list[tuple[float, int]]]]:
    """Return the turns of each response of the groups, see :class:`Workload`. Groups with a retry or a replay are left out."""
    requests, admitted, finished = (events.frame(kind) for kind in ("request", "admitted", "finished"))
    if requests.empty or admitted.empty or finished.empty:
        return {}
    # A run that was killed generates groups again when it resumes: the requests of the last time count.
    begins = {(row.attempt, row.group): row.t for row in admitted.itertuples()}
    ends = {row.group: (row.attempt, row.t) for row in finished.itertuples()}
    found: dict[int, list[list[tuple[float, int]]]] = {}
    requests = requests[requests.group.isin({*groups} & ends.keys() - {*events.frame("retried").group})]
    for group, of_group in requests[requests.stop.isin(("stop", "length"))].groupby("group"):
        attempt, ended = ends[group]
        of_group = of_group[of_group.attempt == attempt]
        if (attempt, group) not in begins or of_group.empty or of_group.replayed.any():
            continue
        end_wait_s = max(0.0, ended - of_group.t_end.max())  # rewards, for all samples
        for _, of_sample in of_group.groupby("sample"):
            turns, before = [], begins[attempt, group]
            for request in of_sample.sort_values("t_submit").itertuples():
                tokens = sum(segment[1] for segment in request.segments)
                turns.append((max(0.0, request.t_submit - before), tokens))
                before = request.t_end
            found.setdefault(int(group), []).append([*turns, (end_wait_s, 0)])
    return {group: each for group, each in found.items() if all(sum(t for _, t in turns) for turns in each)}


def _decode_speed(
    segments: pandas.DataFrame, slots: int, recorded_share: float, since: float, until: float
) -> tuple[float, float, float, float]:
    """Fit the engines' speed to the durations of the segments that end between two times.

    A segment of ``L`` tokens takes ``(L + p) * (a + b * n)`` seconds, where ``n`` is the mean number of requests in the batch
    over its decode steps, and ``w`` seconds more for its way to the engine and back. For one that waited for a slot, the way
    does not count: it entered when the client saw the end of another one, which had the same way back.

    Returns:
        ``a`` and ``b`` in seconds, ``p`` in decode steps (for its prompt), ``w`` in seconds.
    """
    engines, at_once = [], []
    for _, of_engine in segments.groupby("engine"):
        ordered = of_engine.sort_values("t0", kind="stable")
        ends = ordered.t1.to_numpy()
        begins = _batch_entries(ordered.t0.to_numpy(), ends, (ordered.seam == "update").to_numpy(), slots)
        times = np.concatenate([begins, ends])
        order = np.argsort(times, kind="stable")
        batch = np.cumsum(np.repeat([1, -1], len(begins))[order]) / recorded_share
        at_once.append(begins == ordered.t0.to_numpy())
        engines.append((times[order], np.clip(batch, 1.0, slots), begins, ends, ordered.tokens.to_numpy(float)))
    lengths = np.concatenate([each[4] for each in engines])
    seconds = np.concatenate([ends - begins for _, _, begins, ends, _ in engines])
    last = np.concatenate([ends for _, _, _, ends, _ in engines])
    fitted = (since <= last) & (last <= until)
    if not fitted.any():
        fitted[:] = True
    a, b, c, way_s, means = 1.0, 0.0, 0.0, 0.0, np.ones(len(lengths))
    for _ in range(_ROUNDS):
        per_segment = []
        for times, batch, begins, ends, _ in engines:
            steps = np.diff(times) / (a + b * batch[:-1])
            sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in (steps, steps * batch[:-1])]
            decoded, requests = (np.interp(ends, times, each) - np.interp(begins, times, each) for each in sums)
            per_segment.append(np.where(decoded > 0, requests / np.maximum(decoded, 1e-12), 1.0))
        means = np.concatenate(per_segment)
        columns = np.stack([lengths, lengths * means, np.ones(len(lengths)), np.concatenate(at_once)], axis=1)
        a, b, c, way_s = _least_squares(columns[fitted], seconds[fitted])
        if a + b == 0.0:  # times per request explain few and noisy segments best, but tokens take time
            a, b, c, way_s = *_least_squares(columns[fitted][:, :2], seconds[fitted]), 0.0, 0.0
        if a + b == 0.0:
            raise ConfigError("The recorded requests took no time, so the engines' speed is unknown.")
    return a, b, c / (a + b * float(np.average(means[fitted], weights=lengths[fitted]))), way_s


def _batch_entries(
    begins: NDArray[np.float64], ends: NDArray[np.float64], continued: NDArray[np.bool_], slots: int
) -> NDArray[np.float64]:
    """Return when each segment entered the batch: when it was sent, or later, when a slot was free. Sorted by ``begins``.

    Args:
        continued: segments that kept the slot of the segment before, across a weight update.
    """
    entered = begins.copy()
    running: list[float] = []  # a heap of ends
    waiting: deque[int] = deque()
    for index, begin in enumerate([*begins, np.inf]):
        while running and running[0] <= begin:
            free_at = heapq.heappop(running)
            if waiting and len(running) < slots:
                next_one = waiting.popleft()
                entered[next_one] = min(free_at, ends[next_one])
                heapq.heappush(running, ends[next_one])
        if index == len(begins):
            break
        if continued[index] or len(running) < slots:
            heapq.heappush(running, ends[index])
        else:
            waiting.append(index)
    return entered


def _least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Return the factors >= 0 of the columns with the least squared error; of equally good ones, those with fewer columns."""
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            factors = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ factors - values) ** 2))
            if (factors >= 0).all() and error < 0.999 * least:
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = factors
    return [float(each) for each in best]
