"""Throughput cost of a staleness bound: the real asynchronous trainer on modelled engines in virtual time, over S, D and tails.

    python benchmarks/staleness_price.py throughput     accept and mask at S = 2, against min(generation, training)
    python benchmarks/staleness_price.py strictness     wait and wait_batched over S, beside the best schedule without drops
    python benchmarks/staleness_price.py strictness --width 32 --plot docs/images/price_of_a_bound.svg
    python benchmarks/staleness_price.py strictness --futures 24 --width 32 --bounds 1 2 --tails 8 16 32
    python benchmarks/staleness_price.py depth          throughput and lag over D and the number of slots

Responses are log-normal; the tail is the longest over the mean one. Groups have one response, so groups have the same tail.
The unit of time is a mean response; the engine's slots make as many mean responses in a unit as it has slots.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths, log_normal
from skyrl_train.simulation.run import Outcome, Workload, simulate
from skyrl_train.simulation.schedule import Pipeline, best_found, least_time, planned_time
from skyrl_train.simulation.training import TrainingSpeed

MEAN_TOKENS = 32
# Training time of a step over its generation time with all slots in use.
REGIMES = {"generation-bound": 0.6, "balanced": 1.0, "training-bound": 1.5}


def workload(options: argparse.Namespace, tail: float, ratio: float, slots: int, *, per_token: bool) -> Workload:
    """``ratio``: training time over generation time. Training takes its time per token, or the same for each step."""
    generation_s = MEAN_TOKENS * options.batch / slots
    tokens = MEAN_TOKENS * options.batch
    return Workload(
        lengths=lengths(options, tail),
        batch_groups=options.batch,
        steps=options.steps,
        engine=EngineSpeed(slots=slots, step_s=1.0),
        training=TrainingSpeed(per_token_s=ratio * generation_s / tokens)
        if per_token
        else TrainingSpeed(per_step_s=ratio * generation_s),
    )


def lengths(options: argparse.Namespace, tail: float) -> Lengths:
    """Return as many lengths as the run trains, so that it sees the whole distribution once."""
    return log_normal(options.batch * options.steps, MEAN_TOKENS, tail, options.seed)


def run(work: Workload, policy: str, bound: int, depth: float, workers: int | None = None) -> Outcome:
    settings = {"staleness_policy": policy, "max_staleness_steps": bound, "generate_ahead_steps": depth}
    if workers is not None:
        settings["num_parallel_generation_workers"] = workers
    edge = work.steps // 6
    return simulate(work, *(f"trainer.fully_async.{name}={value}" for name, value in settings.items()), edge=edge)


def throughput(options: argparse.Namespace) -> None:
    print("Sampled tokens trained per second over min(generation, training); S = 2, D = 2.\n")
    print(
        "| tail | slots / B | regime | policy | throughput | mean lag | max trained lag | groups over S | masked tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for tail in options.tails:
        for share in options.slots:
            for regime, ratio in REGIMES.items():
                for policy in ("accept", "mask"):
                    work = workload(options, tail, ratio, round(share * options.batch), per_token=True)
                    outcome = run(work, policy, 2, 2)
                    print(
                        f"| {tail:g} | {share:g} | {regime} | `{policy}` | **{outcome.utilization:.3f}** "
                        f"| {outcome.mean_lag:.2f} | {outcome.max_trained_lag} | {outcome.share_over(2):.3f} "
                        f"| {outcome.masked_share:.3f} |",
                        flush=True,
                    )


def strictness(options: argparse.Namespace) -> None:
    print("D = S, W = slots = B. Throughput over min(generation, training), whole runs, both ends included.")
    print("- planned: a planner that knows the distribution of lengths and no single length (--futures)")
    print("- found: the fastest of the other schedules and a search that knows all lengths (--width)")
    print("- bound: no schedule without drops reaches more\n")
    print(
        "| regime | tail | S | wait | wait_batched | planned | found | bound | of planned | of found | max trained lag |"
    )
    print("|---" * 11 + "|")
    lines: dict[tuple[str, float], list[float]] = {}
    for regime, ratio in REGIMES.items():
        for tail in options.tails:
            for bound in options.bounds:
                work = workload(options, tail, ratio, options.batch, per_token=False)
                wait = run(work, "wait", bound, bound, options.batch)
                # With D = 0 both policies are the same.
                wait_batched = run(work, "wait_batched", bound, bound, options.batch) if bound else wait
                others = other_schedules(options, work, bound)
                ideal_s = options.steps * max(MEAN_TOKENS, work.training.per_step_s)
                better_s = min(wait.total_s, wait_batched.total_s)
                planned_s, least_s = others.get("planned", better_s), others["bound"]
                found_s = min(better_s, planned_s, others.get("searched", better_s))
                shares = (
                    ideal_s / total_s for total_s in (wait.total_s, wait_batched.total_s, planned_s, found_s, least_s)
                )
                print(
                    f"| {regime} | {tail:g} | {bound} | {' | '.join(f'{share:.3f}' for share in shares)} "
                    f"| **{planned_s / better_s:.3f}** | **{found_s / better_s:.3f}** "
                    f"| {max(wait.max_trained_lag, wait_batched.max_trained_lag)} |",
                    flush=True,
                )
                lines.setdefault((regime, tail), []).append(ideal_s / better_s)
    if options.plot:
        draw(options.plot, options.bounds, lines)


def other_schedules(options: argparse.Namespace, work: Workload, bound: int) -> dict[str, float]:
    """Return the seconds of schedules that no staleness policy can make during a run."""
    durations = [work.lengths[i] for i in range(options.batch * options.steps)]
    pipeline = Pipeline(durations, options.batch, bound, work.training.per_step_s, work.engine.slots)
    seconds = {"bound": least_time(pipeline)}
    if options.futures:
        seconds["planned"] = planned_time(pipeline, options.futures, horizon=4 + 6 * bound)
    if options.width:
        seconds["searched"] = best_found(pipeline, options.width)
    return seconds


def draw(path: Path, bounds: Sequence[int], lines: Mapping[tuple[str, float], Sequence[float]]) -> None:
    """Draw a panel for each regime and a line for each tail."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(REGIMES), sharey=True)
    for panel, regime in zip(panels, REGIMES, strict=True):
        for (of, tail), values in lines.items():
            if of == regime:
                panel.plot(bounds, values, marker="o", markersize=3, label=f"{tail:g}")
        panel.set(title=regime, xlabel="S, bound on the lag (steps)", ylim=(0, 1.05), xticks=bounds)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("throughput over min(generation, training)")
    panels[-1].legend(title="longest / mean response", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def depth(options: argparse.Namespace) -> None:
    print("Balanced, S = 4. Throughput over min(generation, training) / mean lag.\n")
    depths = (0.5, 1, 1.5, 2, 3, 4)
    print(f"| tail | slots / B | policy | {' | '.join(f'D = {d:g}' for d in depths)} |")
    print("|---" * (3 + len(depths)) + "|")
    for tail in options.tails:
        for share in options.slots:
            for policy in ("accept", "mask", "wait", "drop"):
                work = workload(options, tail, 1.0, round(share * options.batch), per_token=True)
                outcomes = [run(work, policy, 4, d) for d in depths]
                cells = " | ".join(f"{o.utilization:.3f} / {o.mean_lag:.2f}" for o in outcomes)
                print(f"| {tail:g} | {share:g} | `{policy}` | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("throughput", "strictness", "depth"))
    parser.add_argument("--batch", type=int, default=64, help="B, groups per step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tails", type=float, nargs="*", default=[2, 8, 16, 32])
    parser.add_argument("--bounds", type=int, nargs="*", default=[0, 1, 2, 3, 4, 6, 8, 12, 16], help="S")
    parser.add_argument("--slots", type=float, nargs="*", default=[0.5, 1.0], help="slots over B")
    parser.add_argument(
        "--width", type=int, default=0, help="of the search for a faster schedule; 0: none (64 takes minutes)"
    )
    parser.add_argument(
        "--futures",
        type=int,
        default=0,
        help="that the planner samples after each weight sync; 0: no planner (24 takes minutes)",
    )
    parser.add_argument("--plot", type=Path, help="strictness: also draws the runs, into this file")
    options = parser.parse_args()
    began = time.process_time()
    {"throughput": throughput, "strictness": strictness, "depth": depth}[options.table](options)
    print(f"\n{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
