"""Steps and seconds until the mean reward reaches a target: TRL's GRPO trainer and our modes, over several seeds.

    python benchmarks/time_to_reward.py [--recipes quickstart sort_digits] [--modes sync fully_async] [--seeds 5]
        [--targets 0.5 0.8 0.9] [--steps N] [--python PYTHON_WITH_TRL]

The trainers take turns at each seed, with equal initial weights, prompts, rewards, batch, optimizer, learning rate and number of
steps (``against_trl.py`` says what is equal). TRL trains the recipes whose answer is one response: all but ``guess_number``.

A target is reached at the end of the first step at which the mean reward of ``WINDOW`` steps is as high. Seconds are those of the
steps, without start-up. The tables show the median over the seeds, the lowest and the highest value in brackets, and in how many
runs the target was reached. A ratio is the median over the seeds at which both reached it, of the seconds of one run and those of
the other at the same seed: TRL's and each mode's, then ``sync``'s and each mode's. Steps do not depend on how busy the machine is
(but for the asynchronous modes); seconds do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from against_trl import Step, run_ours, run_trl, shared_settings, trl_command

from skyrl_train.config.compose import compose

WINDOW = 10  # steps
MODES = ("sync", "one_step_off", "partial_rollout", "fully_async")
SEVERAL_TURNS = ("guess_number",)  # TRL's method for single responses does not train them


def reached(steps: Sequence[Step], target: float) -> tuple[int, float] | None:
    """Return the number of steps and of seconds until ``target``; None: not reached."""
    for end in range(WINDOW, len(steps) + 1):
        if statistics.fmean(step.reward for step in steps[end - WINDOW : end]) >= target:
            return end, sum(step.seconds for step in steps[:end])
    return None


def spread(values: Sequence[float], seeds: int) -> str:
    if not values:
        return f"0 of {seeds}"
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}; {len(values)} of {seeds})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "sort_digits"])
    parser.add_argument("--modes", nargs="+", default=["sync", "fully_async"], choices=MODES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--steps", type=int, help="default: those of the recipe")
    parser.add_argument("--python", help="an interpreter that has TRL; default: uv makes an environment")
    options = parser.parse_args()
    command = trl_command(options.python)
    for recipe in options.recipes:
        steps = options.steps or compose(recipe).trainer.max_steps
        runs: dict[str, list[list[Step]]] = {}
        with tempfile.TemporaryDirectory() as name:
            for seed in range(1, options.seeds + 1):
                settings = shared_settings(recipe, steps, seed, Path(name))
                results = {} if recipe in SEVERAL_TURNS else {"TRL": run_trl(command, settings, Path(name), threads=1)}
                results |= {mode: run_ours(mode, settings, Path(name)) for mode in options.modes}
                for label, result in results.items():
                    runs.setdefault(label, []).append(result)
                    found = [reached(result, target) for target in options.targets]
                    print(f"{recipe}, seed {seed}, {label}: {found}", flush=True)
        print(f"\n{recipe}, {steps} steps, {options.seeds} seeds\n")
        baselines = [label for label in ("TRL", "sync") if label in runs]
        head = ["reward", "trainer", "steps", "seconds", *(f"{label}'s seconds / own" for label in baselines)]
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for target in options.targets:
            found = {label: [reached(run, target) for run in of_label] for label, of_label in runs.items()}
            for label, ends in found.items():
                cells = [spread([end[place] for end in ends if end], options.seeds) for place in (0, 1)]
                for baseline in baselines:
                    ratios = [a[1] / b[1] for a, b in zip(found[baseline], ends, strict=True) if a and b]
                    cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
                print(f"| {target} | {label} | {' | '.join(cells)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
