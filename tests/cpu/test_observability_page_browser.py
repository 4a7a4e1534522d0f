"""The page in a real browser: each view draws a recorded run, live and narrow, without a complaint."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import uvicorn
from browser import CHROMIUM, Browser, browsing
from recorded_runs import RecordedRun
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.report.compare import compare_runs, comparison_html
from skyrl_train.observability.report.files import write_report
from skyrl_train.observability.run_folder import CONFIG, METRICS, SAMPLES

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")

HOSTILE = "<img src=x onerror=document.title='injected'>\u202e\x1b[31m"
SHOTS = os.environ.get("SKYRL_PAGE_SHOTS")  # a folder for screenshots


@asynccontextmanager
async def serving(root: Path, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            wrap(create_page(root)), lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        server.capture_signals = lambda: nullcontext()  # type: ignore[method-assign]
        task = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        await task


async def shot(browser: Browser, name: str) -> None:
    if SHOTS:
        await browser.screenshot(Path(SHOTS) / f"{name}.png")


def painted(selector: str) -> str:
    """An expression that is true once the canvas has at least 3 colours."""
    return f"""(() => {{
        const seen = new Set(), small = new OffscreenCanvas(200, 200).getContext("2d", {{willReadFrequently: true}});
        small.drawImage(document.querySelector("{selector}"), 0, 0, 200, 200);
        const data = small.getImageData(0, 0, 200, 200).data;
        for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
        return seen.size >= 3;
    }})()"""


async def test_each_view_draws_the_run_and_complains_about_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    RecordedRun(runs / "first-1", engines=2)
    RecordedRun(runs / "second-1", steps=4)
    hostile = runs / "hostile"
    hostile.mkdir()
    (hostile / CONFIG).write_text(json.dumps({"trainer": {"mode": HOSTILE, HOSTILE: HOSTILE}}))
    (hostile / METRICS).write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + '\n{"step": 2, "reward/mean": NaN}\n{"ste')
    with closing(EventLog(hostile / EVENTS)) as log:
        alarm = {"id": HOSTILE, "level": "alarm", "finding": HOSTILE, "action": HOSTILE}
        log.record("alarm", state="begins", step=1, **alarm)
        log.record("retried", group=1, attempt=1, reason=HOSTILE)
    async with serving(runs) as url, browsing(tmp_path / "profile") as browser:
        await browser.size(1300, 800)
        await browser.open(url)
        await browser.until("document.querySelectorAll('tbody tr').length === 3")
        await shot(browser, "runs")
        of_first = f"{url}#/run/first-1"
        await browser.open(f"{of_first}/overview")
        await browser.until("document.querySelectorAll('.uplot canvas').length >= 8")
        await browser.until(painted(".uplot canvas"))
        await browser.until("document.querySelector('.card .note').innerText === '▲ a checkpoint'")
        assert await browser.value("document.querySelector('.halves').innerText.trim().split(/\\s*\\n\\s*/)") == [
            "gained in flight",
            "gained in the queue",
        ]
        await browser.until("document.querySelector('.verdict').innerText.includes('Learned: reward 0.2')")
        await shot(browser, "overview")
        await browser.open(f"{of_first}/timeline")
        await browser.until(painted(".lanes canvas"))
        await shot(browser, "timeline")
        await browser.open(f"{of_first}/samples?phase=train&step=3&row=1")
        await browser.until("document.querySelectorAll('.tokens [data-i]').length > 5")
        # Four of the eight responses of this step end by their length; facets are combined.
        for facet, option, rows in (("stop_reason", "length", 4), ("reward", "", 1), ("stop_reason", "", 2)):
            await browser.value(f"""(() => {{
                const facet = document.querySelector("[data-facet={facet}]");
                facet.value = "{option}" || facet.options["{facet}" === "reward" ? 1 : 0].value;
                facet.dispatchEvent(new Event("change", {{bubbles: true}}));
            }})()""")
            await browser.until(f"document.querySelectorAll('table.samples tbody tr').length === {rows}")
        await browser.value("document.querySelector('.tokens [data-i]').click()")
        await browser.until("document.querySelector('.facts').innerText.includes('log-prob')")
        await shot(browser, "samples")
        await browser.value("[...document.querySelectorAll('.sample button')].at(-1).click()")
        await browser.until("document.querySelector('.sample table').innerText.includes('prompt tokens')")
        await shot(browser, "turns")
        await browser.open(f"{of_first}/metrics")
        await browser.until("document.querySelectorAll('.uplot canvas').length >= 10")
        await browser.open(f"{of_first}/config")
        await browser.until("document.body.innerText.includes('trainer.max_steps')")

        for view in ("evaluations", "engines", "failures"):
            await browser.open(f"{of_first}/{view}")
            await browser.until(f"document.querySelector('nav [aria-current]').href.endsWith('/{view}')")
            await browser.until("!document.querySelector('main').innerText.includes('Reading')")
            if view == "engines":  # the second one runs three times as many requests, and samples as many tokens
                cells = "[...document.querySelectorAll('.share')].map(one => one.innerText)"
                assert await browser.value(cells) == ["25 %", "50 %", "75 %", "50 %"]
            await shot(browser, view)
        assert await browser.value("document.querySelector('h3').innerText") == "Alarms and advice"
        await browser.open(f"{url}#/compare?run=first-1&run=second-1")
        await browser.until("document.querySelectorAll('.uplot canvas').length >= 6")
        await browser.until("document.body.innerText.includes('trainer.max_steps')")
        await shot(browser, "compare")

        # A step that the run writes now appears without a reload.
        await browser.open(f"{of_first}/overview")
        await browser.until("document.querySelector('header').innerText.includes('step 8')")
        with (runs / "first-1" / METRICS).open("a") as file:
            file.write('{"step": 9, "reward/mean": 0.123}\n')
        await browser.until("document.querySelector('header').innerText.includes('step 9')")
        await browser.until("document.querySelector('.card .now').innerText === '0.123'")

        # Narrow and dark: nothing sticks out.
        await browser.size(390, 844, dark=True)
        for view in ("overview", "timeline", "samples?step=3&row=1", "engines", "failures", "metrics", "config"):
            await browser.open(f"{of_first}/{view}")
            await browser.until(
                "document.querySelector('main').innerText.length > 40 && !document.querySelector('.empty')"
            )
            await browser.until("document.documentElement.scrollWidth <= 390")  # charts fit themselves in after a frame
            await shot(browser, f"narrow_{view.partition('?')[0]}")
        for view in ("overview", "timeline", "samples", "evaluations", "engines", "failures", "metrics", "config"):
            await browser.open(f"{url}#/run/hostile/{view}")
            await browser.until("document.querySelector('nav [aria-current]')")
            await browser.until("document.querySelector('.advice.alarm').innerText.includes('1 attempt failed')")
            await shot(browser, f"hostile_{view}")
        await browser.until("document.querySelector('.ctl')")
        assert "injected" not in await browser.value("document.title")
        # An alarm that was muted stays so, and can be shown again.
        await browser.value("document.querySelector('.advice .mute').click()")
        await browser.until("!document.querySelector('.advice')")
        await browser.open(f"{url}#/run/hostile/overview")
        await browser.until("document.querySelector('main').innerText.includes('1 muted')")
        await browser.value("[...document.querySelectorAll('button')].find(one => one.innerText === 'show').click()")
        await browser.until("document.querySelector('.advice')")

        # The same pictures in files, without a server.
        comparison = tmp_path / "compare.html"
        comparison.write_text(comparison_html(compare_runs([runs / "first-1", runs / "second-1", hostile])))
        for path, canvases in ((comparison, 7), (write_report(runs / "first-1"), 8)):
            await browser.open(path.as_uri())
            await browser.until(f"document.querySelectorAll('.uplot canvas').length >= {canvases}")
            assert await browser.value("document.documentElement.scrollWidth") <= 390, path.name
        await browser.until("document.querySelector('.lanes').clientHeight > 100")
        await browser.until(painted(".lanes canvas"))
        await browser.size(1300, 800)
        await shot(browser, "report")
        assert "JavaScript" not in await browser.value("document.querySelector('main').innerText")
        assert browser.complaints == []


async def test_a_run_of_a_thousand_steps_lists_some_of_them_and_marks_no_checkpoint_without_its_step(
    tmp_path: Path,
) -> None:
    run = RecordedRun(tmp_path / "long-1", steps=4).path
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:3]))  # the checkpoint is of step 4
    for step in range(5, 1001):
        os.link(run / SAMPLES / "step_000004.parquet", run / SAMPLES / f"step_{step:06}.parquet")
    async with serving(tmp_path) as url, browsing(tmp_path / "profile") as browser:
        await browser.size(1300, 800)
        await browser.open(f"{url}#/run/long-1/overview")
        answered = (
            "performance.getEntriesByType('resource').some(one => one.name.includes('checkpoints') && one.responseEnd)"
        )
        await browser.until(f"{answered} && document.querySelectorAll('.uplot canvas').length >= 8")
        await browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        assert not await browser.value("document.body.innerText.includes('a checkpoint')")

        await browser.open(f"{url}#/run/long-1/samples?step=500")
        await browser.until("document.querySelector('select')?.value === '500'")
        options = await browser.value("[...document.querySelector('select').options].map(one => Number(one.value))")
        assert options == sorted(options) and {1, *range(450, 551), 1000} <= {*options}
        assert len(options) < 450 and max(b - a for a, b in pairwise(options)) <= 5
        assert browser.complaints == []


async def test_the_page_follows_a_run_again_after_a_proxy_has_answered_for_its_server(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "first-1", steps=4).path
    refused: list[str] = []

    def behind_a_proxy(app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/api/live" and not refused:
                refused.append(scope["path"])
                await PlainTextResponse("Bad Gateway", 502)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return answer

    async with serving(tmp_path, behind_a_proxy) as url, browsing(tmp_path / "profile") as browser:
        await browser.open(f"{url}#/run/first-1/overview")
        await browser.until("document.querySelector('header').innerText.includes('step 4')")
        with (run / METRICS).open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.123}\n')
        await browser.until("document.querySelector('.card .now')?.innerText === '0.123'")
        assert refused


async def test_figures_are_drawn_where_they_belong(tmp_path: Path) -> None:
    times = {"step": 10.0, "train": 3.0, "gather": 0.0, "wait_for_batch": 0.5, "transfer": 0.3, "pause": 0.2}
    times |= {"wait_for_weight_sync": 6.5, "wait_for_evaluation": 6.0}
    rows = [{"step": step, **{f"time/{name}": value for name, value in times.items()}} for step in (1, 2)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with serving(tmp_path) as url, browsing(tmp_path / "profile") as browser:
        await browser.open(f"{url}#/run/run/overview")
        card = "[...document.querySelectorAll('.card')].find(one => one.innerText.startsWith('Who waits'))"
        await browser.until(f"{card}?.querySelectorAll('.u-series').length === 5")
        legend = f"[...{card}.querySelectorAll('.u-series')].map(one => one.innerText.replace(/(\\.0+)? %/, '%'))"
        assert await browser.value(legend) == [
            "step2", "waits for groups5%", "other turns60%", "weight sync5%", "training30%",
        ]  # fmt: skip
        # Rewards may be negative, and a chart without values has a scale too.
        ends = "[[-2, -1], [-1, 1], [1, 2], [null, null]]"
        ranges = f"import('/static/charts.js').then(m => {ends}.map(one => m.zeroBased(null, ...one)))"
        assert await browser.value(ranges) == [[-2.12, 0], [-1.06, 1.06], [0, 2.12], [0, 1]]
        # The state of an engine is none of the time in which nothing ran, as before a resume.
        since = "import('/static/lanes.js').then(m => m.beginnings([[5], [6], [7], [100], [101]]))"
        assert await browser.value(since) == [4, 5, 6, 99, 100]
        assert browser.complaints == []
