"""Rewards and speed under each staleness policy: real policies trained in virtual time (docs/benchmarks.md).

    python benchmarks/policy_learning.py --out rows.jsonl [--tasks run_length] [--policies accept wait] [--bounds 1 4] [--seeds 0]
    python benchmarks/policy_learning.py --out rows.jsonl --policies mask --bounds 4 --depths 1 2 adapts     instead of D = S
    python benchmarks/policy_learning.py --out rows.jsonl --lrs 5e-4 1.5e-3     at several learning rates
    python benchmarks/policy_learning.py --out rows.jsonl --uncorrected     without token TIS
    python benchmarks/policy_learning.py --out rows.jsonl --table           the table of the file

A cell is a task, a policy, a bound S, a depth D, with or without correction, a learning rate, and a seed. A cell that is in the
file already is not run again, so the table can be made in pieces; the load of the machine does not change a run. By default
D = S, which keeps the pipeline as full as the bound allows: groups are as old as they may be, and slow groups older.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.learning import LearningTask, learn
from skyrl_train.simulation.lengths import rare_tail
from skyrl_train.simulation.training import TrainingSpeed

POLICIES = ("accept", "wait", "mask", "drop")
BATCH, SAMPLES = 8, 8
SLOTS = 128  # all requests that D = 1 admits at once, two ninths of those of D = 8
ENGINE = EngineSpeed(SLOTS, step_s=1.0, transfer_s=0.5, load_s=0.1)
TRAINING = TrainingSpeed(per_token_s=0.8 / SLOTS)  # training takes 0.8 of the time of generation with all slots in use
SMALL = (
    f"trainer.policy_mini_batch_size={BATCH}",
    f"generator.n_samples_per_prompt={SAMPLES}",
    "trainer.policy.model.build.num_layers=1",
    "trainer.policy.optimizer_config.scheduler=constant",  # so that runs can be compared at the same time, too
    "trainer.samples_per_step=0",
)
TASKS = {
    # Answers of 1 to 24 letters, mean 4.5: the responses themselves have the tail, and long ones are difficult.
    "run_length": LearningTask(
        "quickstart",
        (*SMALL, "environment.kwargs={mean_count: 4, max_count: 24}", "generator.sampling_params.max_tokens=26"),
        ENGINE,
        TRAINING,
    ),
    # Up to four short turns with tool calls between them, of 2 s in the mean; one in a hundred takes 40 s.
    "guess_number": LearningTask("guess_number", SMALL, ENGINE, TRAINING, tools_s=rare_tail(4096, 2, 20, seed=0)),
}
LAST = 0.1  # of the steps; their mean reward is the result of a run


@dataclass(frozen=True)
class Cell:
    """One run of ``steps``. ``workload`` is a digest of the task's settings: a row with another digest does not belong to this
    cell."""

    task: str
    bound: int
    depth: float | None  # None: it adapts, the default
    policy: str
    corrected: bool
    lr: float  # constant
    seed: int
    steps: int
    workload: str


def depth_of(text: str) -> float | str:
    """Parse ``--depths``: ``adapts``, ``S`` or a number of steps."""
    return text if text in ("adapts", "S") else float(text)


def cell(
    task: str, bound: int, depth: float | str, policy: str, corrected: bool, lr: float, seed: int, steps: int
) -> Cell:
    """Return the cell of the task with its current settings."""
    work = TASKS[task]
    tools = b"" if work.tools_s is None else work.tools_s.values.tobytes()
    settings = repr((work.recipe, work.settings, work.engine, work.training)).encode()
    steps_ahead = None if depth == "adapts" else float(bound if depth == "S" else depth)
    digest = hashlib.sha256(settings + tools).hexdigest()[:8]
    return Cell(task, bound, steps_ahead, policy, corrected, lr, seed, steps, digest)


def overrides(work: Cell) -> list[str]:
    correction = "trainer.algorithm.off_policy_correction"
    asynchrony = "trainer.fully_async"
    return [
        f"trainer.seed={work.seed}",
        f"data.seed={work.seed}",
        f"trainer.max_steps={work.steps}",
        f"trainer.policy.optimizer_config.lr={work.lr}",
        f"{asynchrony}.staleness_policy={work.policy}",
        f"{asynchrony}.max_staleness_steps={work.bound}",
        f"{asynchrony}.generate_ahead_steps={'null' if work.depth is None else work.depth}",
        *(() if work.corrected else (f"{correction}.tis_ratio_type=null", f"{correction}.allow_uncorrected=true")),
    ]


def run(work: Cell) -> dict[str, Any]:
    """Train one cell and return its row."""
    torch.set_num_threads(1)
    began = time.process_time()
    outcome = learn(TASKS[work.task], *overrides(work), edge=work.steps // 10)
    return {
        **asdict(work),
        "reward": outcome.last_reward(LAST),
        "step_s": outcome.step_s,
        "mean_lag": outcome.mean_lag,
        "max_trained_lag": outcome.max_trained_lag,
        "exceeds_bound": outcome.share_over(work.bound),
        "masked": outcome.masked_share,
        "dropped": outcome.dropped_share,
        "rewards": [round(reward, 4) for reward in outcome.rewards],
        "ended_s": [round(record.ended_s - outcome.began_s, 2) for record in outcome.records],
        "processor_s": round(time.process_time() - began, 1),
    }


def finished(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the rows of the file, by cell."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {Cell(**{name: row[name] for name in Cell.__dataclass_fields__}): row for row in rows}


def run_missing(cells: list[Cell], path: Path, jobs: int) -> None:
    """Run the cells that the file lacks; write and print each row as soon as it is known."""
    missing = [each for each in cells if each not in finished(path)]
    print(
        "| task | S | D | policy | TIS | lr | seed | reward | step | mean lag | max trained lag | over S | masked | dropped |"
    )
    print("|---" * 14 + "|", flush=True)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, path.open("a", encoding="utf-8") as file:
        for row in pool.imap_unordered(run, missing):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"| `{row['task']}` | {row['bound']} | {_depth(row['depth'])} | `{row['policy']}` | {_yes_no(row['corrected'])} "
                f"| {row['lr']:g} | {row['seed']} | {row['reward']:.3f} | {row['step_s']:.1f} s | {row['mean_lag']:.2f} "
                f"| {row['max_trained_lag']} | {row['exceeds_bound']:.3f} | {row['masked']:.3f} | {row['dropped']:.3f} |",
                flush=True,
            )


def table(rows: dict[Cell, dict[str, Any]], cells: list[Cell]) -> Iterator[str]:
    """Yield a line per setting, over its seeds: medians of rewards, means of the rest. Speeds are relative to ``accept`` with
    D = S and the same seeds, or to the same policy with D = S where the file has no ``accept``."""
    yield (
        "| task | TIS | lr | S | D | policy | seeds | reward, median | lowest .. highest | steps/s over `accept` "
        "| reward in `accept`'s time | mean lag | max trained lag | over S | masked | dropped |"
    )
    yield "|---" * 16 + "|"
    settings = {_setting(each) for each in cells if each in rows}
    for setting in sorted(
        settings, key=lambda s: (s.task, not s.corrected, s.lr, s.bound, -(s.depth or 0), POLICIES.index(s.policy))
    ):
        own = list(_by_seed(rows, cells, setting).values())
        full = setting._replace(depth=float(setting.bound))
        accept = _by_seed(rows, cells, full._replace(policy="accept")) or _by_seed(rows, cells, full)
        pairs = [(row, accept[row["seed"]]) for row in own if row["seed"] in accept]
        speed = f"{fmean(a['step_s'] / row['step_s'] for row, a in pairs):.2f}" if pairs else ""
        timely = f"{median(reward_within(row, a['ended_s'][-1]) for row, a in pairs):.3f}" if pairs else ""
        rewards = [row["reward"] for row in own]
        yield (
            f"| `{setting.task}` | {_yes_no(setting.corrected)} | {setting.lr:g} | {setting.bound} | {_depth(setting.depth)} "
            f"| `{setting.policy}` | {len(own)} | **{median(rewards):.3f}** | {min(rewards):.3f} .. {max(rewards):.3f} "
            f"| {speed} | {timely} "
            f"| {_mean(own, 'mean_lag'):.2f} | {max(row['max_trained_lag'] for row in own)} | {_mean(own, 'exceeds_bound'):.3f} "
            f"| {_mean(own, 'masked'):.3f} | {_mean(own, 'dropped'):.3f} |"
        )


def averages(rows: dict[Cell, dict[str, Any]], cells: list[Cell]) -> Iterator[str]:
    """Yield a line per policy and correction: the means of the columns of :func:`table` over the settings with D = S, and the
    number of pairs of the same seed and setting in which the reward is higher than under ``accept``."""
    yield "| policy | TIS | settings | reward in `accept`'s time | reward | steps/s over `accept` | ahead of `accept` |"
    yield "|---" * 7 + "|"
    for corrected, policy in itertools.product((True, False), POLICIES):
        timely, rewards, speeds, ahead, pairs = [], [], [], 0, 0
        settings = {_setting(each) for each in cells if (each.corrected, each.policy) == (corrected, policy)}
        for setting in sorted(each for each in settings if each.depth == each.bound):
            own = _by_seed(rows, cells, setting)
            accept = _by_seed(rows, cells, setting._replace(policy="accept"))
            matched = [(own[seed], accept[seed]) for seed in own if seed in accept]
            if not matched:
                continue
            timely.append(median(reward_within(row, a["ended_s"][-1]) for row, a in matched))
            rewards.append(median(row["reward"] for row, _ in matched))
            speeds.append(fmean(a["step_s"] / row["step_s"] for row, a in matched))
            ahead += sum(row["reward"] > a["reward"] for row, a in matched)
            pairs += len(matched)
        if rewards:
            yield (
                f"| `{policy}` | {_yes_no(corrected)} | {len(rewards)} | {fmean(timely):.2f} | {fmean(rewards):.2f} "
                f"| {fmean(speeds):.2f} | {ahead} of {pairs} |"
            )


def _by_seed(rows: dict[Cell, dict[str, Any]], cells: list[Cell], setting: Setting) -> dict[int, dict[str, Any]]:
    return {each.seed: rows[each] for each in cells if each in rows and _setting(each) == setting}


def reward_within(row: dict[str, Any], limit_s: float) -> float:
    """Return the mean reward of the last steps that ended by then, over as many steps as the reward of a whole run."""
    steps = sum(ended_s <= limit_s for ended_s in row["ended_s"])
    return fmean(row["rewards"][max(0, steps - round(LAST * len(row["rewards"]))) : steps])


class Setting(NamedTuple):
    """A cell without its seed."""

    task: str
    corrected: bool
    lr: float
    bound: int
    depth: float | None
    policy: str


def _setting(each: Cell) -> Setting:
    return Setting(each.task, each.corrected, each.lr, each.bound, each.depth, each.policy)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return fmean(row[name] for row in rows)


def _depth(depth: float | None) -> str:
    return "adapts" if depth is None else f"{depth:g}"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a jsonl file; rows are added to it")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--bounds", nargs="+", type=int, default=[1, 4, 8], help="S")
    parser.add_argument("--depths", nargs="+", type=depth_of, default=["S"], help="D: numbers, S or adapts")
    parser.add_argument("--lrs", nargs="+", type=float, default=[1.5e-3], help="constant learning rates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--uncorrected", action="store_true", help="without token TIS, instead of with it")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--table", action="store_true", help="print the table of the file; run nothing")
    options = parser.parse_args()
    if options.table:
        grid = itertools.product(
            options.tasks, options.bounds, options.depths, options.policies, (True, False), options.lrs, options.seeds
        )
        rows, cells = finished(options.out), [cell(*values, options.steps) for values in grid]
        print("\n".join([*table(rows, cells), "", *averages(rows, cells)]))
        return
    order = itertools.product(
        options.seeds, options.lrs, options.bounds, options.depths, options.tasks, options.policies
    )
    corrected, steps = not options.uncorrected, options.steps
    cells = [cell(task, bound, d, policy, corrected, lr, seed, steps) for seed, lr, bound, d, task, policy in order]
    run_missing(cells, options.out, options.jobs)


if __name__ == "__main__":
    main()
