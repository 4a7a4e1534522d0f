"""Processor time that the record of a run takes from the control process, with thousands of groups in flight.

    python benchmarks/record_cost.py [--groups 5000] [--samples 1 8] [--rounds 5]
    python benchmarks/record_cost.py --instructions --groups 300     # needs valgrind, and minutes

The run of ``driver_cost.py``: the real trainer, workers, rules, buffer, client and fleet on a modelled engine in virtual time. No
call waits, so a run offers events about as fast as a control process can that does nothing else, and the limit
``trainer.max_events_per_s`` works; the last line has no limit.

*Events alone* is the processor time to record, encode, write and compress the events of the run one after the other, over that
of the run. It lacks what the loop does to find the fields. The difference of runs with and without the record has that too, but
equal runs differ by more than the goal of 1 %. ``--instructions`` counts processor instructions instead, which two equal runs
repeat to 0.3 %: the same run without, with, with and without the record in one process under valgrind, the thread that writes
included. The run is slower there, so the clock of the limit is slowed down alike.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from driver_cost import DEPTH, workload

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.events.reader import EventReader
from skyrl_train.runtime.process import gc_tuned
from skyrl_train.simulation.run import Workload, simulate

UNLIMITED = 10**9
COUNTED = (False, True, True, False)  # whether each counted run is recorded


def run_s(work: Workload, events: EventLog) -> float:
    """Return processor seconds of a run, with all threads."""
    settings = {"max_staleness_steps": 2 * DEPTH, "generate_ahead_steps": DEPTH, "staleness_policy": "accept"}
    overrides = [f"trainer.fully_async.{name}={value}" for name, value in settings.items()]
    began_s = time.process_time()
    simulate(work, *overrides, edge=DEPTH + 1, events=events)
    events.close()
    return time.process_time() - began_s


def replayed_s(events: list[dict[str, object]], folder: Path) -> float:
    """Return processor seconds to record, encode, write and compress these events, and nothing else."""
    log = EventLog(folder, queue_events=4 * len(events))
    rows = [{name: value for name, value in event.items() if name not in ("t", "m")} for event in events]
    began_s = time.process_time()
    for row in rows:
        log.record(**row)  # type: ignore[arg-type]
    log.close()
    return time.process_time() - began_s


def counted(work: Workload, limit: int, native_s: float) -> None:
    """Run under valgrind: one dump of the counted instructions for each of :data:`COUNTED`.

    Args:
        native_s: processor seconds of a run without the record outside valgrind.
    """

    def control(action: str) -> None:
        subprocess.run(["callgrind_control", action, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)

    slowdown = 1.0

    def clock() -> float:
        return time.monotonic() / slowdown

    for recorded in COUNTED:
        with tempfile.TemporaryDirectory() as name:
            control("--zero")
            seconds = run_s(work, EventLog(Path(name), limit, clock=clock) if recorded else NO_EVENTS)
            control("--dump")
        slowdown = slowdown if recorded else seconds / native_s


def instructions(arguments: list[str], native_s: float) -> list[int]:
    """Return the instructions of each of :data:`COUNTED`, of this program under valgrind."""
    with tempfile.TemporaryDirectory() as name:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={name}/out", sys.executable, __file__]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        run = [*command, *arguments, "--counted", str(native_s)]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"valgrind failed:\n{done.stderr[-2000:]}")
        dumps = [Path(name, f"out.{number}").read_text() for number in range(1, len(COUNTED) + 1)]
    return [int(re.findall(r"^summary: (\d+)", dump, re.MULTILINE)[-1]) for dump in dumps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=5000, help="in flight at once")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256, help="of a mean response")
    limit = TrainerConfig().max_events_per_s
    parser.add_argument("--limits", type=int, nargs="*", default=[limit, UNLIMITED], help="trainer.max_events_per_s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instructions", action="store_true", help="count instructions, with valgrind")
    parser.add_argument("--counted", type=float, help=argparse.SUPPRESS)  # under valgrind: see counted()
    options = parser.parse_args()
    run_s(workload(10 * (DEPTH + 1), 16, 1), NO_EVENTS)  # triggers late imports
    if not options.counted:
        print("| samples each | limit | without | events | events alone | on disk |", end="")
        print(
            " in instructions |\n|---|---|---|---|---|---|---|"
            if options.instructions
            else "\n|---|---|---|---|---|---|"
        )
    with gc_tuned():  # as the training command does
        for samples in options.samples:
            work = workload(options.groups, options.tokens, samples)
            for limit in options.limits:
                if options.counted:
                    counted(work, limit, options.counted)
                    continue
                without, alone = [], []
                for _ in range(options.rounds):
                    without.append(run_s(work, NO_EVENTS))
                    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
                        run_s(work, EventLog(Path(name), limit))
                        events = EventReader(Path(name)).poll()
                        on_disk = sum(path.stat().st_size for path in Path(name).iterdir())
                        alone.append(replayed_s(events, Path(other)))
                base = min(without)
                limited = "none" if limit == UNLIMITED else f"{limit:,}"
                line = f"| {samples} | {limited} | {base:.2f} s | {len(events):,} | **{min(alone) / base:.2%}** |"
                line += f" {on_disk / 1e6:.1f} MB |"
                if options.instructions:
                    asked = {
                        "--groups": options.groups,
                        "--tokens": options.tokens,
                        "--samples": samples,
                        "--limits": limit,
                    }
                    of = instructions([str(part) for pair in asked.items() for part in pair], base)
                    line += f" **{(of[1] + of[2]) / (of[0] + of[3]) - 1:+.2%}** ({of[0] / of[3] - 1:+.2%} between equal runs) |"
                print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
