"""Comparison of all modes on the same devices: real trainers on modelled engines and training, in virtual time.

    python benchmarks/modes.py [--steps 40] [--cases 0 1 2]

Colocated modes (sync, partial_rollout) use all devices for each phase and pay for switching between them; the others split the
devices, and the best split near the balanced one is shown. A decode step takes longer the more requests are in its batch, so that
fewer engines with fuller batches lose less than their share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths, constant, log_normal, rare_tail
from skyrl_train.simulation.run import Outcome, Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed

MEAN_TOKENS = 32  # a token of the simulation stands for 1/32 of a mean response
BATCH, SAMPLES = 32, 8  # groups per step, responses per group
SLOTS = 64  # per device; with all in use, a decode step takes twice as long as with one
TRANSFER_S, LOAD_S = 1.0, 0.1  # of new weights; a mean response alone on an engine takes 32 s
SWITCH_S = 1.0  # colocated: engines to sleep, and awake again
ENGINE = EngineSpeed(SLOTS, step_s=1.0, step_per_request_s=1.0 / SLOTS, prefill_steps_per_token=0.02, load_s=LOAD_S)


@dataclass(frozen=True)
class Case:
    """A workload. A device trains ``training_speed`` times as many tokens per second as it decodes with full slots."""

    name: str
    devices: int
    lengths: Callable[[int], Lengths]  # of so many responses
    training_speed: float


CASES = (
    Case("APR's: 1 % of the responses are 20 times the mean", 8, lambda n: rare_tail(n, MEAN_TOKENS, 20, 0), 4.0),
    Case("log-normal, the longest 8 times the mean", 8, lambda n: log_normal(n, MEAN_TOKENS, 8, 0), 4.0),
    Case("all equally long, few devices", 4, lambda n: constant(n, MEAN_TOKENS), 8.0),
)
SETTINGS = {
    "sync": (),
    "partial_rollout": ("staleness_policy=accept",),
    "one_step_off": (),
    "fully_async": ("generate_ahead_steps=null", "max_staleness_steps=4", "staleness_policy=accept"),
    "fully_async, mask": ("generate_ahead_steps=null", "max_staleness_steps=4", "staleness_policy=mask"),
    "fully_async, streaming": ("generate_ahead_steps=null", "max_staleness_steps=4", "streaming_min_groups=8"),
}
COLOCATED = ("sync", "partial_rollout")


def workloads(case: Case, mode: str, steps: int) -> Iterator[Workload]:
    """Return the workload on all devices, or on each split worth trying."""
    if mode in COLOCATED:
        engine = replace(ENGINE, sleep_s=SWITCH_S)
        # The synchronous trainer does not put engines to sleep itself; the cost is the same.
        switch_s = 2 * SWITCH_S if mode == "sync" else 0.0
        yield workload(case, engine, case.devices, case.devices, steps, switch_s)
        return
    engine = replace(ENGINE, transfer_s=TRANSFER_S)
    balanced = round(case.devices * case.training_speed / (1 + case.training_speed))
    for engines in range(max(1, balanced - 2), min(case.devices - 1, balanced + 1) + 1):
        yield workload(case, engine, engines, case.devices - engines, steps, 0.0)


def workload(case: Case, engine: EngineSpeed, engines: int, trainers: int, steps: int, switch_s: float) -> Workload:
    decode_tokens_per_s = SLOTS * engine.steps_per_s(SLOTS)
    training = TrainingSpeed(switch_s, per_token_s=1.0 / (case.training_speed * decode_tokens_per_s * trainers))
    return Workload(case.lengths(BATCH * SAMPLES * steps), BATCH, steps, engine, training, engines, SAMPLES)


def best(case: Case, mode: str, steps: int) -> Outcome:
    settings = [f"trainer.mode={mode.partition(',')[0]}"]
    settings += [f"trainer.fully_async.{setting}" for setting in SETTINGS[mode]]
    outcomes = [simulate(work, *settings, edge=steps // 5) for work in workloads(case, mode, steps)]
    return max(outcomes, key=lambda outcome: outcome.tokens_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    options = parser.parse_args()
    for case in (CASES[number] for number in options.cases):
        print(f"{case.name}; {case.devices} devices, B = {BATCH}, n = {SAMPLES}\n")
        print("| mode | engines + trainers | step | over sync | mean lag | max trained lag | masked tokens |")
        print("|---|---|---|---|---|---|---|")
        sync: Outcome | None = None
        for mode in SETTINGS:
            outcome = best(case, mode, options.steps)
            sync = sync or outcome
            engines = outcome.workload.engines
            devices = f"{engines}, shared" if mode in COLOCATED else f"{engines} + {case.devices - engines}"
            print(
                f"| {mode} | {devices} | {outcome.step_s:.1f} s | **{outcome.tokens_per_s / sync.tokens_per_s:.2f}** "
                f"| {outcome.mean_lag:.2f} | {outcome.max_trained_lag} | {outcome.masked_share:.3f} |",
                flush=True,
            )
        print()


if __name__ == "__main__":
    main()
