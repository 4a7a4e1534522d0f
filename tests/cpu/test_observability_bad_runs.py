"""Every reader on every kind of bad run folder: it shows what is there or says what is wrong, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from recorded_runs import RecordedRun
from starlette.testclient import TestClient

import skyrl_train
from skyrl_train.entrypoints.command_line import main
from skyrl_train.events import reader
from skyrl_train.events.log import EVENTS, SEGMENT_BYTES, compress_closed, segment_paths
from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.readers import timeline
from skyrl_train.observability.readers.panel import WatchedRun
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, FINISHED, METRICS, SAMPLES
from skyrl_train.observability.screens import SCREENS, RunScreens

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m\x07"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )  # with NaN and Infinity, as older versions wrote them


def plain_segment(run: Path) -> Path:
    """The only segment, as the open one of a run that trains or was killed."""
    (path,) = segment_paths(run / EVENTS).values()
    content = reader.segment_content(path)
    path.unlink()
    plain = run / EVENTS / "000001.jsonl"
    plain.write_bytes(content)
    return plain


def half_written(run: Path) -> None:
    for path in (run / METRICS, plain_segment(run), run / CONFIG, *(run / SAMPLES).iterdir()):
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    (run / EVALUATIONS).write_text('{"step": 1, "eval/rew')


def killed(run: Path) -> None:
    plain = plain_segment(run)
    plain.write_bytes(plain.read_bytes().rpartition(b'{"kind":"end"')[0] + b'{"kind":"span","t":18')
    (run / SAMPLES / ".step_000009.parquet.tmp").write_bytes(b"PAR1")
    (run / FINISHED).with_suffix(".json.tmp").write_text("{")


def of_an_older_version(run: Path) -> None:
    shutil.rmtree(run / EVENTS)
    shutil.rmtree(run / SAMPLES)
    settings = yaml.safe_load((run / CONFIG).read_text())
    settings["trainer"]["straggler_policy"] = settings["trainer"].pop("fully_async")
    (run / CONFIG).write_text(yaml.safe_dump(settings))
    rows = lines_of(run / METRICS)
    write_lines(run / METRICS, [{"step": row["step"], "reward/mean": row["reward/mean"]} for row in rows])
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": "1+1=", "response": "2", "reward": 1.0}])


def of_a_newer_version(run: Path) -> None:
    plain = plain_segment(run)
    rows = [{**row, "further": [1]} for row in lines_of(plain)]
    write_lines(plain, [*rows, {"kind": "novel", "t": 1.0, "m": 1.0}, {"kind": "span", "t": "later", "m": None}])
    write_lines(run / METRICS, [{**row, "novel/metric": 1.0, "novel/text": "x"} for row in lines_of(run / METRICS)])
    (run / "novel").mkdir()


def with_numbers_that_are_none(run: Path) -> None:
    odd = [float("nan"), float("inf"), -float("inf"), 10**400, True, None, "0.5", [], {}]
    rows = lines_of(run / METRICS)
    for number, row in enumerate(rows):
        row |= {name: odd[(number + place) % len(odd)] for place, name in enumerate(row) if name != "step"}
    write_lines(run / METRICS, rows)
    write_lines(run / EVALUATIONS, [{"step": 1, "eval/reward": float("nan")}, {"step": 2, "eval/reward": 10**400}])


def with_hostile_texts(run: Path) -> None:
    plain = plain_segment(run)
    rows = lines_of(plain)
    for row in rows:
        row |= {name: HOSTILE for name in ("uid", "session", "error", "host") if isinstance(row.get(name), str)}
    also = {"t": rows[-1]["t"], "m": rows[-1]["m"], "group": 1, "attempt": 1, "reason": HOSTILE}
    write_lines(plain, [*rows, {"kind": "retried", **also}])
    write_lines(run / METRICS, [{**row, HOSTILE: 1.0} for row in lines_of(run / METRICS)])
    write_lines(run / EVALUATIONS, [{"step": 1, "policy_version": HOSTILE, f"eval/pass@1{HOSTILE}": 0.5}])
    (run / CONFIG).write_text(yaml.safe_dump({"trainer": {"mode": HOSTILE, HOSTILE: HOSTILE}}))


def with_a_clock_that_jumps(run: Path) -> None:
    plain = plain_segment(run)
    rows = lines_of(plain)
    write_lines(plain, [{**row, "t": row["t"] + (-1e6 if number % 3 else 1e6)} for number, row in enumerate(rows)])
    metrics = lines_of(run / METRICS)
    times = [{"time": row["time"] * (-1) ** row["step"], "elapsed_s": 100.0 - row["step"]} for row in metrics]
    write_lines(run / METRICS, [{**row, **time} for row, time in zip(metrics, times, strict=True)])
    os.utime(run / METRICS, (4e9, 4e9))  # written in the year 2096


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / CONFIG).touch()
    (run / METRICS).touch()
    (run / EVENTS).mkdir()
    (run / EVENTS / "000001.jsonl").touch()


DAMAGES: list[Callable[[Path], None]] = [
    half_written, killed, of_an_older_version, of_a_newer_version, with_numbers_that_are_none, with_hostile_texts,
    with_a_clock_that_jumps, empty,
]  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_reader_copes_and_only_reads(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    run, other = RecordedRun(runs / "bad-1", steps=5).path, RecordedRun(runs / "good-1", steps=3).path
    (run / "logs").mkdir()
    (run / "logs" / "trainer.log").write_text(HOSTILE)
    damage(run)
    before = content(runs)

    client = TestClient(create_page(runs), base_url="http://localhost")
    names = "&name=reward/mean&name=time/&name=staleness/histogram/"
    for path in (
        "runs", "run?run=bad-1", "verdict?run=bad-1", "advice?run=bad-1", f"metrics?run=bad-1{names}", "settings?run=bad-1",
        "evaluations?run=bad-1", "compare?run=bad-1&run=good-1", "compare?run=bad-1&run=good-1&axis=elapsed",
        "engines?run=bad-1", "incidents?run=bad-1", "log?run=bad-1&file=trainer.log", "timeline?run=bad-1",
        "timeline?run=bad-1&step=3", "timeline?run=bad-1&t0=0&t1=9e12", "samples?run=bad-1", "samples?run=bad-1&step=2",
        "sample?run=bad-1&phase=train&step=2&row=0", "prompt?run=bad-1&uid=u1",
    ):  # fmt: skip
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 200, (path, answer.text)
        assert not re.search(r"\b(NaN|Infinity)\b", answer.text) and json.loads(answer.text) != {}, path
    assert 'run="bad-1"' in client.get("/metrics").text

    output = tmp_path / "output"
    output.mkdir()
    commands = {
        "watch": ["watch", str(run), "--once"],
        "report": ["report", str(run), "--output", str(output)],
        "compare": ["compare", str(run), str(other), "--output", str(output / "compare.html")],
        "trace": ["trace", str(run), "--output", str(output / "trace.json.gz")],
    }
    for verb, command in commands.items():
        capsys.readouterr()
        code, said = main(command), capsys.readouterr()
        assert code == 0 or (code == 2 and verb in ("compare", "trace")), (command, code, said.err)
        assert code == 0 or ("Error: " in said.err and "Traceback" not in said.err), said.err
        assert not {"\u202e", "\x07"} & set(said.out + said.err), "characters that steer the terminal"
    assert "<img" not in (output / "report.html").read_text()

    opened = skyrl_train.load_run(run)
    assert len(opened.metrics) <= 5 and len(opened.samples) >= 0 and opened.events.counts is not None
    assert isinstance(opened.advice, list)
    assert content(runs) == before


# By default a torn record and a hostile one. Each takes a second of processor time.
SCREENED = (half_written, with_hostile_texts)


@pytest.mark.parametrize(
    "damage",
    [pytest.param(each, marks=() if each in SCREENED else pytest.mark.slow, id=each.__name__) for each in DAMAGES],
)
async def test_every_screen_of_watch_copes_and_only_reads(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = RecordedRun(tmp_path / "bad-1", steps=5).path
    (run / "logs").mkdir()
    (run / "logs" / "trainer.log").write_text(HOSTILE)
    damage(run)
    before = content(tmp_path)
    app = RunScreens(WatchedRun(run), poll_s=600.0)
    async with app.run_test(size=(120, 40)) as pilot:
        for number in range(1, len(SCREENS) + 1):
            await pilot.press(str(number))
            await app.workers.wait_for_complete()
            await pilot.pause()
            await app.workers.wait_for_complete()  # the sample under the cursor
            shown = "".join(segment.text for line in app.screen._compositor.render_strips() for segment in line)
            assert not {"\u202e", "\x07", "\x1b"} & set(shown), "characters that steer the terminal"
            assert "Reading ..." not in shown
    assert content(tmp_path) == before


@pytest.mark.slow
def test_a_record_of_ten_gigabytes_costs_no_more_than_its_newest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "large-1", steps=3).path
    first = plain_segment(run)
    padding = b'{"kind":"note","t":1800000001.0,"m":5001.0,"text":"%s"}\n' % (b"x" * 4000)
    second = run / EVENTS / "000002.jsonl"
    second.write_bytes(padding * (SEGMENT_BYTES // len(padding)))
    compress_closed(run / EVENTS, 2)
    segments = 10 * 2**30 // SEGMENT_BYTES
    for number in range(3, segments):
        os.link(run / EVENTS / "000002.jsonl.zst", run / EVENTS / f"{number:06}.jsonl.zst")
    first.write_bytes(reader.segment_content(run / EVENTS / "000001.jsonl.zst"))
    first.rename(run / EVENTS / f"{segments:06}.jsonl")  # the newest part
    read, whole = [0], reader.segment_content

    def counting(path: Path, *limits: int) -> bytes:
        found = whole(path, *limits)
        read[0] += len(found)
        return found

    monkeypatch.setattr(timeline, "segment_content", counting)
    monkeypatch.setattr(reader, "segment_content", counting)
    store = timeline.EventStore(run / EVENTS)
    window = store.window(None, None)
    assert window is not None and {group["group"] for group in window["groups"]} >= set(range(4, 12))
    assert read[0] < 300 * 2**20, "the first lines of all segments, and the newest segments"
    before = read[0]
    assert store.window(None, None) is not None and store.rare() is not None
    assert read[0] - before < 600 * 2**20, "once: the newest segments, for failures"
    before = read[0]
    assert store.window(None, None) is not None and store.rare() is not None
    assert read[0] - before < 16 * 2**20, "what may have been appended"
