"""Processor time that the record of a run takes from the control process, with thousands of groups in flight.

    python benchmarks/record_cost.py [--groups 5000] [--samples 1 8] [--rounds 5]

The run of ``driver_cost.py``, in turns with and without the record of its events: the real trainer, workers, rules, buffer,
client and fleet on a modelled engine in virtual time. No call waits, so a run offers events about as fast as a control process
can that does nothing else, and the limit ``trainer.max_events_per_s`` works; the last line has no limit. *Cost* is the
difference of the least processor times of both kinds of runs, because other programs only add to them; they include the thread
that encodes, writes and compresses. *Events alone* is the time that the events of the run take one after the other, over the
time of the run. It has less noise, and lacks what the loop does to find the fields.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from driver_cost import DEPTH, workload

from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.events.reader import EventReader
from skyrl_train.runtime.process import gc_tuned
from skyrl_train.simulation.run import Workload, simulate

UNLIMITED = 10**9


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=5000, help="in flight at once")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256, help="of a mean response")
    parser.add_argument("--limits", type=int, nargs="*", default=[500, UNLIMITED], help="trainer.max_events_per_s")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    run_s(workload(10 * (DEPTH + 1), 16, 1), NO_EVENTS)  # triggers late imports
    print("| samples each | limit | without | with | cost | events | events alone | on disk |")
    print("|---|---|---|---|---|---|---|---|")
    with gc_tuned():  # as the training command does
        for samples in options.samples:
            work = workload(options.groups, options.tokens, samples)
            for limit in options.limits:
                without, recorded, alone = [], [], []
                for _ in range(options.rounds):
                    without.append(run_s(work, NO_EVENTS))
                    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
                        recorded.append(run_s(work, EventLog(Path(name), limit)))
                        events = EventReader(Path(name)).poll()
                        on_disk = sum(path.stat().st_size for path in Path(name).iterdir())
                        alone.append(replayed_s(events, Path(other)))
                base, total, part = map(min, (without, recorded, alone))
                limited = "none" if limit == UNLIMITED else f"{limit:,}"
                line = f"| {samples} | {limited} | {base:.2f} s | {total:.2f} s | {(total - base) / base:+.1%} |"
                print(f"{line} {len(events):,} | **{part / base:.2%}** | {on_disk / 1e6:.1f} MB |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
