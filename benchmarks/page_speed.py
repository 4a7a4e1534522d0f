"""The page in a headless Chromium, and watch in a terminal: first paint, frames, delay of a live step, processor time of readers.

    python benchmarks/page_speed.py [--events 100000] [--bars 2000] [--seconds 10]

It needs Chromium (Debian: apt install chromium). A run of a scripted rhythm is written as a run writes it.

- *First paint*: from opening the address until the curves of the overview, or the lanes of the timeline, are drawn.
- *Frames*: the timeline pans by a bit in each frame, as a dragging hand does.
- *Live*: from a line that is appended to ``metrics.jsonl`` until the page shows its step.
- *Viewer*: processor time of the server's process by the time that passed, while the run writes 500 events a second and a
  step a second, without and with a browser that shows the overview and the timeline of the last steps.
- *Watch*: the same of ``skyrl-train watch`` in a terminal of 160 x 50, with its panel and with its timeline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.events.reader import EventReader
from skyrl_train.observability.run_folder import METRICS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cpu"))
from browser import CHROMIUM, Browser, browsing
from recorded_runs import RecordedRun

OVERVIEW = "document.querySelectorAll('.uplot canvas').length >= 8 && document.querySelector('.card .now').innerText"
TIMELINE = "document.querySelector('.lanes canvas')?.width > 300 && document.querySelector('.legend').innerText"
PAN = """(async () => {
    const canvas = document.querySelector('.lanes canvas'), times = [];
    const frame = () => new Promise(done => requestAnimationFrame(done));
    for (let count = 0; count < FRAMES; count++) {
        const deltaX = count % 40 < 20 ? 8 : -8;
        canvas.dispatchEvent(new WheelEvent('wheel', {deltaX, clientX: 600, clientY: 300, bubbles: true, cancelable: true}));
        times.push(await frame());
    }
    return times;
})()"""


@contextlib.asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "skyrl_train", "page", str(root), "--port", "0"]
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        line = (await server.stdout.readline()).decode()
        yield line.rpartition(" at ")[2].strip(), psutil.Process(server.pid)
    finally:
        server.terminate()
        await server.wait()


async def first_paint(browser: Browser, url: str, drawn: str) -> float:
    """Return the seconds until ``drawn`` is true in a page that was not open before."""
    await browser.open("about:blank")
    await browser.open(url)
    await browser.until(drawn)
    return float(await browser.value("performance.now()")) / 1000


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def write(run: Path, seconds: float) -> None:
    """Write 500 events a second, more than the default of trainer.max_events_per_s."""
    requests = [event for event in EventReader(run / EVENTS).poll() if event["kind"] == "request"]
    step = 1_000_000
    with contextlib.closing(EventLog(run / EVENTS)) as log, (run / METRICS).open("a") as metrics:
        row = json.loads((run / METRICS).read_text().splitlines()[0])
        for second in range(int(seconds)):
            for number in range(500):
                event = requests[(second * 500 + number) % len(requests)]
                log.record(**{name: value for name, value in event.items() if name not in ("t", "m")})
            metrics.write(json.dumps({**row, "step": step + second, "time": time.time()}) + "\n")
            metrics.flush()
            await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def watching(run: Path) -> AsyncIterator[tuple[int, psutil.Process]]:
    """Run ``skyrl-train watch`` in a terminal; yield the end that types, and the process."""
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (50, 160))
    command = [sys.executable, "-m", "skyrl_train", "watch", str(run)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=inside, stdout=inside, stderr=inside, env=environment
    )
    os.close(inside)
    screen = asyncio.Event()
    asyncio.get_running_loop().add_reader(terminal, lambda: os.read(terminal, 65536) and screen.set())
    try:
        await screen.wait()
        yield terminal, psutil.Process(process.pid)
    finally:
        asyncio.get_running_loop().remove_reader(terminal)
        process.terminate()
        await process.wait()
        os.close(terminal)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    samples = 8
    steps = options.events // (16 * 11)  # about eleven events for a group of eight samples
    run = RecordedRun(folder / "runs" / "long-1", steps=steps, groups=16, samples=samples).path
    events = len(EventReader(run / EVENTS).poll())
    groups = options.bars // (samples * 2)  # some responses have two turns, or two versions
    RecordedRun(folder / "runs" / "lanes-1", steps=6, groups=max(1, groups // 4), samples=samples)
    print("| a run writes 500 events and a step per second | measured | goal |\n|---|---|---|", flush=True)
    async with serving(folder / "runs") as (url, server), browsing(folder / "profile") as browser:
        await browser.size(1400, 900)
        of_run = f"{url}#/run/long-1"
        await first_paint(browser, f"{of_run}/overview", OVERVIEW)  # the browser's own start
        for name, view, drawn in (("overview", "overview", OVERVIEW), ("timeline", "timeline", TIMELINE)):
            seconds = [await first_paint(browser, f"{of_run}/{view}", drawn) for _ in range(3)]
            print(
                f"| first paint of the {name}, {events:,} events | {statistics.median(seconds):.2f} s | 1 s |",
                flush=True,
            )
        await first_paint(browser, f"{url}#/run/lanes-1/timeline", TIMELINE)
        query = "fetch('api/timeline?run=lanes-1').then(one => one.json()).then(one => one.groups.reduce("
        query += "(sum, group) => sum + group.requests.reduce((all, request) => all + request[6].length, 0), 0))"
        bars = await browser.value(query)
        times = await browser.value(PAN.replace("FRAMES", str(options.frames)))
        frames = [after - before for before, after in itertools.pairwise(times[10:])]
        rate = 1000 / statistics.fmean(frames)
        print(f"| frames of the timeline that pans over {bars:,} bars | {rate:.0f} per second | 30 |", flush=True)
        print(f"| the slowest of them | {max(frames):.0f} ms | |", flush=True)
        await first_paint(browser, f"{of_run}/overview", OVERVIEW)
        delays = []
        for number in range(3):
            began = time.monotonic()
            with (run / METRICS).open("a") as file:
                file.write(json.dumps({"step": steps + 1 + number, "reward/mean": 0.5}) + "\n")
            await browser.until(f"document.querySelector('header').innerText.includes('step {steps + 1 + number}')")
            delays.append(time.monotonic() - began)
        print(f"| a step is shown after it was written | {statistics.median(delays):.2f} s | 1 s |", flush=True)
        for name, view in (
            ("nobody looks", None),
            ("the overview is open", "overview"),
            ("the timeline is open", "timeline"),
        ):
            await browser.open("about:blank" if view is None else f"{of_run}/{view}")
            await asyncio.sleep(2.0)
            before, began = used_s(server), time.monotonic()
            await write(run, options.seconds)
            share = (used_s(server) - before) / (time.monotonic() - began)
            goal = "" if view is None else "3 %"
            print(f"| the page's server, {name} | {100 * share:.1f} % of a core | {goal} |", flush=True)
    async with watching(run) as (terminal, process):
        for key, name in ((b"1", "panel"), (b"2", "timeline")):
            await asyncio.sleep(5.0)  # it has started, or ended to draw the screen before
            os.write(terminal, key)
            await asyncio.sleep(5.0)
            before, began = used_s(process), time.monotonic()
            await write(run, options.seconds)
            share = (used_s(process) - before) / (time.monotonic() - began)
            print(f"| `skyrl-train watch` with its {name} | {100 * share:.1f} % of a core | 3 % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--bars", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each measurement of the server")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("Chromium is missing (Debian: apt install chromium).")
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(options, Path(name)))


if __name__ == "__main__":
    main()
