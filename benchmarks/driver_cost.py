"""What the control process spends on a trajectory, with thousands of groups in flight: processor time, rendering left out.

    python benchmarks/driver_cost.py [--groups 5000] [--tokens 64 256 1024]

The real trainer, workers, rules, buffer, client and fleet on a modelled engine, in virtual time: nothing is waited for, and all
processor time is work. It includes the modelled engine, the decoding of responses, the checks of what the generator
returns, and the minibatch; the prompt is one token, and nothing is rendered.
"""

from __future__ import annotations

import argparse

from skyrl_train.garbage import settle_collector
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import log_normal
from skyrl_train.simulation.outcome import Outcome, Workload
from skyrl_train.simulation.run import simulate
from skyrl_train.simulation.training import TrainingSpeed

DEPTH = 4


def run(groups: int, tokens: int, samples: int, policy: str) -> Outcome:
    """All admitted groups are in flight at once: the trainer is quick, and the engine has a slot for each."""
    batch, steps = groups // (DEPTH + 1), 3 * (DEPTH + 1)
    work = Workload(
        lengths=log_normal(batch * samples * steps, tokens, 8, 0),
        batch_groups=batch,
        steps=steps,
        engine=EngineSpeed(slots=(DEPTH + 1) * batch * samples, step_s=1.0),
        training=TrainingSpeed(per_step_s=0.1),
        samples=samples,
    )
    settings = {"max_staleness_steps": 2 * DEPTH, "pipeline_depth": DEPTH, "straggler_policy": policy}
    overrides = [f"trainer.fully_async.{name}={value}" for name, value in settings.items()]
    return simulate(work, *overrides, edge=DEPTH + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=5000, help="in flight at once")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 256, 1024], help="of a mean response")
    parser.add_argument("--policies", nargs="*", default=["accept", "wait"])
    options = parser.parse_args()
    run(10 * (DEPTH + 1), 16, 1, "accept")  # imports what is imported late
    settle_collector()  # as the training command does
    print("| groups in flight | samples each | mean tokens | policy | processor time per trajectory |")
    print("|---|---|---|---|---|")
    for samples in options.samples:
        for tokens in options.tokens:
            for policy in options.policies:
                outcome = run(options.groups, tokens, samples, policy)
                first, *_, last = outcome.records[outcome.edge - 1 : len(outcome.records) - outcome.edge]
                trajectories = (last.step - first.step) * outcome.workload.batch_groups * samples
                cost_ms = 1e3 * (last.processor_s - first.processor_s) / trajectories
                in_flight = max(record.metrics["async/in_flight"] for record in outcome.records)
                print(f"| {in_flight:,.0f} | {samples} | {tokens} | `{policy}` | **{cost_ms:.2f} ms** |", flush=True)


if __name__ == "__main__":
    main()
