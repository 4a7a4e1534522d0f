"""The same work in every mode: which trainer, split of devices, bound and depth is fastest, and how stale its groups are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from skyrl_train.errors import SkyRLError
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.run import Outcome, Workload, simulate

_MEAN_TOKENS = 32  # longer responses are simulated with fewer, larger tokens: the cost of a run grows with its tokens
AS_FAST = 0.98  # of the fastest: the freshest of these is recommended


@dataclass(frozen=True)
class Setup:
    """A mode with its settings, on a split of the devices.

    Attributes:
        mode: ``trainer.mode``.
        engines: that generate, on one device each, or on ``engine_devices``.
        trainers: devices that train; None: the same ones, in turns.
        policy: the staleness policy.
        bound: S.
        depth: D; None: it adapts.
        streaming: ``streaming_min_groups``; None: whole batches.
    """

    mode: str
    engines: int = 1
    trainers: int | None = 1
    policy: str = "mask"
    bound: int = 4
    depth: float | None = None
    streaming: int | None = None
    engine_devices: int = 1

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a run with this schedule; the others keep their defaults."""
        settings = {"trainer.mode": self.mode}
        if self.mode in ("fully_async", "partial_rollout"):
            settings["trainer.fully_async.staleness_policy"] = self.policy
            settings["trainer.fully_async.max_staleness_steps"] = str(self.bound)
        if self.mode == "fully_async":
            settings["trainer.fully_async.generate_ahead_steps"] = "null" if self.depth is None else f"{self.depth:g}"
        if self.streaming is not None:
            settings["trainer.fully_async.streaming_min_groups"] = str(self.streaming)
        if self.trainers is None:
            settings["trainer.placement.colocate_all"] = "true"
        return settings


@dataclass(frozen=True)
class Scenario:
    """Work, and devices of equal speed that generate or train it.

    Attributes:
        workload: its training speed is the one of ``trainers`` devices, which share the tokens of a step evenly.
        switch_s: seconds to give all devices from the engines to the trainer and back. The modes sync and partial_rollout use
            all devices in turns then; None: they split them, as the others do.
        engine_devices: of each engine.
    """

    workload: Workload
    trainers: int
    devices: int
    switch_s: float | None
    engine_devices: int = 1

    @property
    def most_engines(self) -> int:
        """The engines that leave a device for training."""
        return (self.devices - 1) // self.engine_devices

    def splits(self, setup: Setup) -> list[Setup]:
        """Return ``setup`` on the splits worth trying: engines and trainers about equally fast, or all devices in turns."""
        each = self.engine_devices
        setup = replace(setup, engine_devices=each)
        if self.switch_s is not None and setup.mode in ("sync", "partial_rollout"):
            return [replace(setup, engines=self.devices // each, trainers=None)]
        engine, training = self.workload.engine, self.workload.training
        tokens = self.workload.batch_groups * self.workload.samples * self.workload.lengths.mean

        def imbalance(engines: int) -> float:
            generation_s = tokens / (engines * engine.slots * engine.steps_per_s(engine.slots))
            return abs(generation_s - training.per_step_s - self._per_token_s(self.devices - engines * each) * tokens)

        balanced = min(range(1, self.most_engines + 1), key=imbalance)
        near = range(max(1, balanced - 1), min(self.most_engines, balanced + 1) + 1)
        return [replace(setup, engines=engines, trainers=self.devices - engines * each) for engines in near]

    def simulate(self, setup: Setup) -> Outcome | SkyRLError:
        """Return the outcome, or the error that ended the run.

        Raises:
            ConfigError: the settings cannot work.
        """
        in_turns = setup.trainers is None
        engine = replace(self.workload.engine, sleep_s=(self.switch_s or 0.0) / 2 if in_turns else 0.0)
        per_token_s = self._per_token_s(self.devices if setup.trainers is None else setup.trainers)
        training = replace(self.workload.training, per_token_s=per_token_s)
        workload = replace(self.workload, engine=engine, training=training, engines=setup.engines)
        overrides = [f"{name}={value}" for name, value in setup.settings.items()]
        try:
            return simulate(workload, *overrides, "rollout.replay=false", edge=workload.steps // 4)
        except SkyRLError as error:
            if workload.faults is None:
                raise
            return error  # the faults were too much for this setup: that is its result

    def fastest(self, setups: Iterable[Setup]) -> tuple[Setup, Outcome | SkyRLError]:
        """Simulate the setups and return the recommended one, with its outcome; an error if all end with one."""
        results = {setup: self.simulate(setup) for setup in setups}
        chosen = recommended(results) or next(iter(results))
        return chosen, results[chosen]

    def _per_token_s(self, trainers: int) -> float:
        return self.workload.training.per_token_s * self.trainers / trainers


def recommended(results: Mapping[Setup, Outcome | SkyRLError]) -> Setup | None:
    """Return the freshest setup among those within 2 % of the most trained tokens per second; None: all have failed.

    A setup with the policy ``accept`` is chosen only if there are no others: it trains tokens beyond S.
    """
    outcomes = {setup: outcome for setup, outcome in results.items() if isinstance(outcome, Outcome)}
    outcomes = {setup: outcome for setup, outcome in outcomes.items() if setup.policy != "accept"} or outcomes
    most = max((outcome.trained_tokens_per_s for outcome in outcomes.values()), default=0.0)
    fast = [setup for setup, outcome in outcomes.items() if outcome.trained_tokens_per_s >= AS_FAST * most]
    return min(fast, key=lambda setup: outcomes[setup].mean_lag, default=None)


def coarsened(workload: Workload) -> tuple[Workload, float]:
    """Return the same work with larger tokens, and the number of real tokens in each; of short responses, unchanged.

    Times and lags stay as they are, but for rounding. Tokens per second of an outcome count the larger tokens.
    """
    unit = workload.lengths.mean / _MEAN_TOKENS
    if unit <= 1.0:
        return workload, 1.0
    engine, training, turns = workload.engine, workload.training, workload.turns
    if turns is not None:
        turns = [[(wait_s, max(1, round(n / unit)) if n else 0) for wait_s, n in response] for response in turns]
        values = np.array([sum(tokens for _, tokens in response) for response in turns])
    else:
        values = np.maximum(1, np.rint(workload.lengths.values / unit)).astype(np.int64)
    engine = replace(
        engine,
        step_s=engine.step_s * unit,
        step_per_request_s=engine.step_per_request_s * unit,
        prefill_steps_per_token=engine.prefill_steps_per_token / unit,
    )
    training = replace(training, per_token_s=training.per_token_s * unit)
    lengths = Lengths(workload.lengths.name, values)
    return replace(workload, lengths=lengths, engine=engine, training=training, turns=turns), unit
