r"""Takes the documentation's pictures of the page, of a report and of ``watch``, from runs of two examples:

    python examples/page/six_runs.py /runs
    python examples/async/agents/guess_with_anthropic.py trainer.run_dir=/runs/guess_with_anthropic trainer.max_steps=70 \
        generator.inference_engine.num_engines=2 generator.n_samples_per_prompt=4 trainer.policy_mini_batch_size=8
    python docs/pictures.py /runs

It needs Chromium (Debian: apt install chromium). Pictures show the path of the runs. Look at each one that has changed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_train.observability.readers.panel import WatchedRun
from skyrl_train.observability.readers.samples import recorded_files, sample_rows
from skyrl_train.observability.report.files import write_report
from skyrl_train.observability.screens import RunScreens

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cpu"))
from browser import Browser, browsing

IMAGES = Path(__file__).parent / "images"

CURVES = "document.querySelectorAll('.uplot canvas').length >= 6 && document.querySelector('.verdict')"
LANES = "document.querySelector('.lanes canvas')?.width > 300 && document.querySelector('.legend').innerText"
# With the numbers of the first token after an interruption
TOKENS = "(document.querySelector('.tokens .seam')?.click(), document.querySelector('.facts')?.innerText.includes('log-prob'))"
COMPARED = "document.querySelectorAll('.uplot').length > 5 && document.querySelector('tbody')"
ROWS = "document.querySelectorAll('tbody tr').length > 1"
# Of each picture: the address on the page, an expression that is true once it is drawn, and its size in pixels.
PICTURES = {
    "page_overview": ("#/run/healthy/overview", CURVES, 1300, 1160),
    "page_timeline": ("#/run/guess_with_anthropic/timeline?step=40", LANES, 1300, 720),
    "page_evaluations": ("#/run/healthy/evaluations", ROWS, 1300, 640),
    "page_engines": ("#/run/guess_with_anthropic/engines", ROWS, 1300, 640),
    **{
        f"six_{name}": (f"#/run/{name}/overview", CURVES, 1300, 700)
        for name in ("healthy", "generation_bound", "training_bound", "zero_signal", "diverging")
    },
    "six_failing_agent": ("#/run/failing_agent/failures", ROWS, 1300, 760),
    "compare": ("#/compare?run=healthy&run=generation_bound", COMPARED, 1100, 760),
}


def interrupted_sample(run: Path) -> str:
    """Return the address of the newest recorded response that a weight sync interrupted."""
    found = ""
    for (phase, step), path in recorded_files(run).items():
        for number, row in enumerate(sample_rows(path, ["versions", "sampled"])):
            versions = {version for version, own in zip(row["versions"], row["sampled"], strict=True) if own}
            if phase == "train" and len(versions) > 1:
                found = f"#/run/{run.name}/samples?phase=train&step={step}&row={number}"
    return found


async def take(browser: Browser, path: Path, url: str, ready: str, width: int, height: int) -> None:
    await browser.size(width, height)
    await browser.open(url)
    await browser.until(ready)
    await asyncio.sleep(0.5)  # charts fit themselves in, and the lanes are drawn
    tall = await browser.value("document.querySelector('main').getBoundingClientRect().bottom + scrollY")
    await browser.size(width, min(height, int(tall)))
    await asyncio.sleep(0.5)
    await browser.screenshot(path)


async def watch_timeline(run: Path) -> str:
    """Return the timeline of ``watch`` as SVG."""
    app = RunScreens(WatchedRun(run), poll_s=600.0)
    async with app.run_test(size=(120, 24)) as pilot:
        await pilot.press("2")
        await app.workers.wait_for_complete()
        await pilot.pause()
        return app.export_screenshot()


async def main(runs: Path) -> None:
    pictures = PICTURES | {"page_tokens": (interrupted_sample(runs / "healthy"), TOKENS, 1300, 600)}
    command = [sys.executable, "-m", "skyrl_train", "page", str(runs), "--port", "0"]
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        url = (await server.stdout.readline()).decode().rpartition(" at ")[2].strip()
        with tempfile.TemporaryDirectory() as folder:
            async with browsing(Path(folder) / "profile") as browser:
                await browser.call("Emulation.setScrollbarsHidden", hidden=True)
                # Its short responses have an alarm, which the pictures of this run are not about.
                await browser.open(f"{url}#/run/guess_with_anthropic/engines")
                await browser.until("document.querySelector('.advice .mute')")
                await browser.value("document.querySelector('.advice .mute').click()")
                for name, (address, ready, width, height) in pictures.items():
                    await take(browser, IMAGES / f"{name}.png", url + address, ready, width, height)
                report = write_report(runs / "healthy", Path(folder)).as_uri()
                drawn = "document.querySelectorAll('.uplot canvas').length >= 6"
                await take(browser, IMAGES / "report.png", report, drawn, 1100, 960)
                svg = Path(folder) / "watch.svg"
                svg.write_text(await watch_timeline(runs / "failing_agent"))
                await browser.size(1482, 606)  # the shape of 120 x 24 characters
                await browser.open(svg.as_uri())
                await asyncio.sleep(0.5)
                await browser.screenshot(IMAGES / "watch_timeline.png")
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    asyncio.run(main(Path(sys.argv[1])))
