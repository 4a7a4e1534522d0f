"""Throughput cost of a staleness bound: the real asynchronous trainer on modelled engines in virtual time, over S, D and tails.

    python benchmarks/staleness_price.py throughput     accept and mask by default, against min(generation, training)
    python benchmarks/staleness_price.py depth          throughput and lag over D, and with the D that adapts
    python benchmarks/staleness_price.py strictness     wait over S, beside a bound for all schedules without drops
    python benchmarks/staleness_price.py strictness --plot price_of_a_bound.svg
    python benchmarks/staleness_price.py strictness --samples 1 --batch 64 --futures 24 --width 32 --bounds 1 2 --tails 8 16 32

Responses are log-normal; the tail is the longest over the mean one. A group is finished with the slowest of its responses.
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


def workload(options: argparse.Namespace, tail: float, ratio: float, share: float, *, per_token: bool) -> Workload:
    """``ratio``: training time over generation time with as many slots as responses in a step; ``share``: slots over that.
    Training takes its time per token, or the same for each step."""
    responses = options.batch * options.samples
    slots = round(share * responses)
    generation_s = MEAN_TOKENS * responses / slots
    return Workload(
        lengths=lengths(options, tail),
        batch_groups=options.batch,
        steps=options.steps,
        engine=EngineSpeed(slots=slots, step_s=1.0),
        training=TrainingSpeed(per_token_s=ratio * generation_s / (MEAN_TOKENS * responses))
        if per_token
        else TrainingSpeed(per_step_s=ratio * generation_s),
        samples=options.samples,
    )


def lengths(options: argparse.Namespace, tail: float) -> Lengths:
    """Return as many lengths as the run trains, so that it sees the whole distribution once."""
    return log_normal(options.batch * options.samples * options.steps, MEAN_TOKENS, tail, options.seed)


def run(work: Workload, policy: str, bound: int, depth: float | None) -> Outcome:
    """``depth``: None adapts."""
    depth_setting = "null" if depth is None else depth
    settings = {"staleness_policy": policy, "max_staleness_steps": bound, "generate_ahead_steps": depth_setting}
    edge = work.steps // 4
    return simulate(work, *(f"trainer.fully_async.{name}={value}" for name, value in settings.items()), edge=edge)


def throughput(options: argparse.Namespace) -> None:
    print(
        f"Sampled tokens trained per second over min(generation, training); S = 4, D adapts, n = {options.samples}.\n"
    )
    print(
        "| tail | slots / responses of a step | regime | policy | throughput | mean lag | max trained lag | groups over S "
        "| masked tokens |"
    )
    print("|---" * 9 + "|")
    for tail in options.tails:
        for share in options.slots:
            for regime, ratio in REGIMES.items():
                for policy in ("accept", "mask"):
                    outcome = run(workload(options, tail, ratio, share, per_token=True), policy, 4, None)
                    print(
                        f"| {tail:g} | {share:g} | {regime} | `{policy}` | **{outcome.utilization:.3f}** "
                        f"| {outcome.mean_lag:.2f} | {outcome.max_trained_lag} | {outcome.share_over(4):.3f} "
                        f"| {outcome.masked_share:.3f} |",
                        flush=True,
                    )


def depth(options: argparse.Namespace) -> None:
    print(f"S = 4, `mask`, n = {options.samples}. Throughput over min(generation, training) / mean lag.\n")
    depths = (1, 2, 3, 4, None)
    print("| tail | regime | D = 1 | D = 2 | D = 3 | D = 4 | D adapts |")
    print("|---" * 7 + "|")
    for tail in options.tails:
        for regime, ratio in REGIMES.items():
            work = workload(options, tail, ratio, 1, per_token=True)
            outcomes = [run(work, "mask", 4, d) for d in depths]
            cells = " | ".join(f"{o.utilization:.3f} / {o.mean_lag:.2f}" for o in outcomes)
            print(f"| {tail:g} | {regime} | {cells} |", flush=True)


def strictness(options: argparse.Namespace) -> None:
    print(
        f"`wait`, n = {options.samples}, as many slots as responses of a step. Throughput over min(generation, training),"
    )
    print("whole runs, both ends included.")
    print("- planned: a planner that knows the distribution of lengths and no single length (--futures)")
    print("- found: the fastest of the other schedules and a search that knows all lengths (--width)")
    print("- bound: no schedule without drops reaches more\n")
    print("| regime | tail | S | D = S | D adapts | planned | found | bound | of found | max trained lag |")
    print("|---" * 10 + "|")
    lines: dict[tuple[str, float], list[float]] = {}
    for regime, ratio in REGIMES.items():
        for tail in options.tails:
            for bound in options.bounds:
                work = workload(options, tail, ratio, 1, per_token=False)
                ahead, adapting = run(work, "wait", bound, bound), run(work, "wait", bound, None)
                others = other_schedules(options, work, bound)
                better_s = min(ahead.total_s, adapting.total_s)
                found_s = min([better_s, *others.values()])
                seconds = {"D = S": ahead.total_s, "adapts": adapting.total_s, **others, "found": found_s}
                ideal_s = options.steps * max(MEAN_TOKENS, work.training.per_step_s)
                cells = [
                    f"{ideal_s / seconds[name]:.3f}" if name in seconds else ""
                    for name in ("D = S", "adapts", "planned", "found")
                ]
                print(
                    f"| {regime} | {tail:g} | {bound} | {' | '.join(cells)} "
                    f"| {ideal_s / least_time(pipeline(options, work, bound)):.3f} | **{found_s / better_s:.3f}** "
                    f"| {max(ahead.max_trained_lag, adapting.max_trained_lag)} |",
                    flush=True,
                )
                lines.setdefault((regime, tail), []).append(ideal_s / better_s)
    if options.plot:
        draw(options.plot, options.bounds, lines)


def pipeline(options: argparse.Namespace, work: Workload, bound: int) -> Pipeline:
    """Return the constraints of a schedule of the workload's groups."""
    samples = options.samples
    responses = [[work.lengths[g * samples + i] for i in range(samples)] for g in range(options.batch * options.steps)]
    return Pipeline(
        durations=[max(group) for group in responses],
        batch_groups=options.batch,
        max_staleness_steps=bound,
        step_s=work.training.per_step_s,
        slots=work.engine.slots,
        work=[sum(group) for group in responses],
    )


def other_schedules(options: argparse.Namespace, work: Workload, bound: int) -> dict[str, float]:
    """Return the seconds of schedules that no staleness policy can make during a run; they take groups of one response."""
    seconds = {}
    if options.futures:
        seconds["planned"] = planned_time(pipeline(options, work, bound), options.futures, horizon=4 + 6 * bound)
    if options.width:
        seconds["searched"] = best_found(pipeline(options, work, bound), options.width)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("throughput", "strictness", "depth"))
    parser.add_argument("--batch", type=int, default=16, help="B, groups per step")
    parser.add_argument("--samples", type=int, default=8, help="n, responses per group")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tails", type=float, nargs="*", default=[2, 8, 20])
    parser.add_argument("--bounds", type=int, nargs="*", default=[1, 2, 4, 8], help="S")
    parser.add_argument("--slots", type=float, nargs="*", default=[0.5, 1.0], help="slots over B * n")
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
    if options.samples > 1 and (options.width or options.futures):
        parser.error("--width and --futures need --samples 1: these schedules take groups of one response")
    began = time.process_time()
    {"throughput": throughput, "strictness": strictness, "depth": depth}[options.table](options)
    print(f"\n{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
