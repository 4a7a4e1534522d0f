"""The page: what it reads of run folders, whole, torn or hostile, and to whom it answers."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import sys
import tempfile
import time
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import RecordedRun
from starlette.testclient import TestClient

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.page import TOKEN_VARIABLE, address
from skyrl_train.entrypoints.run import recorded_process
from skyrl_train.errors import NoSuchRunError
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.page import app as page_app
from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.readers import folders
from skyrl_train.observability.readers.comparison import best_run, bootstrap_interval, compared
from skyrl_train.observability.readers.encoding import to_json
from skyrl_train.observability.readers.folders import RunsFolder, is_run, read_settings, spread_rows
from skyrl_train.observability.readers.incidents import incidents
from skyrl_train.observability.readers.series import MetricTable, curves
from skyrl_train.observability.readers.settings import differing_settings, settings_table
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.run_folder import CONFIG, FINISHED, LOCK, METRICS, SAMPLES, RunFolder

HOSTILE = "<script>alert(1)</script>\u202e\u0000\x1b[31m"


def write_metrics(run: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    run.mkdir(parents=True, exist_ok=True)
    path = run / METRICS
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def client_of(root: Path, **options: Any) -> TestClient:
    return TestClient(create_page(root, **options), base_url="http://localhost:7860", follow_redirects=False)


# Folders ----------------------------------------------------------------------------------------------------------


def test_runs_are_found_in_a_folder_of_runs_in_groups_of_runs_and_in_a_run_itself(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a-1", [{"step": 1}])
    write_metrics(tmp_path / "sweep" / "b-1", [{"step": 1}])
    (tmp_path / "just-begun").mkdir()
    (tmp_path / "just-begun" / LOCK).touch()
    (tmp_path / "other" / "deep" / "er").mkdir(parents=True)
    assert set(RunsFolder(tmp_path).names()) == {"a-1", "sweep/b-1", "just-begun"}
    assert RunsFolder(tmp_path / "a-1").names() == ["."]
    assert RunsFolder(tmp_path / "other").names() == []


@pytest.mark.parametrize(
    "name", ["../outside", "/etc", "inside/../../outside", "link", "", "\0", "a" * 5000, "inside/none"]
)
def test_a_name_that_leads_out_of_the_folder_is_no_run(tmp_path: Path, name: str) -> None:
    write_metrics(tmp_path / "outside", [{"step": 1}])
    write_metrics(tmp_path / "runs" / "inside", [{"step": 1}])
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    runs = RunsFolder(tmp_path / "runs")
    with pytest.raises(NoSuchRunError):
        runs.path(name)
    assert runs.names() == ["inside"]
    assert client_of(tmp_path / "runs").get("/api/metrics", params={"run": name}).status_code == 404


def test_a_link_in_a_run_that_leads_out_is_a_missing_file(tmp_path: Path) -> None:
    outside = write_metrics(tmp_path / "outside", [{"step": 1, "reward/mean": 0.5}])
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / LOCK).touch()
    (run / METRICS).symlink_to(outside)
    answer = client_of(tmp_path / "runs").get("/api/metrics", params={"run": "run", "name": "reward/mean"}).json()
    assert answer["rows"] == 0


def test_samples_behind_a_link_that_leads_out_are_missing(tmp_path: Path) -> None:
    outside = RecordedRun(tmp_path / "outside", steps=1).path
    (outside / "samples.jsonl").write_text('{"step": 1, "prompt": "secret"}\n')  # of versions without tokens
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / LOCK).touch()
    (run / SAMPLES).symlink_to(outside)  # whose folder samples/ would be read
    assert client_of(tmp_path / "runs").get("/api/samples?run=run").json()["rows"] == []


def test_the_state_of_a_run_follows_from_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = write_metrics(run, [{"step": 1}])
    runs = RunsFolder(tmp_path)
    assert runs.row("run")["state"] == "live"
    for written in (1.0, time.time() + 3 * 86_400):  # a clock that was set back leaves files from the future
        os.utime(path, (written, written))
        assert runs.row("run")["state"] == "silent"
    (run / FINISHED).touch()
    assert runs.row("run")["state"] == "finished"


def test_a_folder_that_may_not_be_looked_into_is_no_run() -> None:
    assert not is_run(Path("x" * 300))  # as with the folder of another user, the file system refuses to answer


def test_the_row_of_a_run_tells_its_last_step(tmp_path: Path) -> None:
    rows = [{"step": step, "time": 100.0 + step, "reward/mean": step / 100} for step in range(1, 101)]
    write_metrics(tmp_path / "run", rows, tail='{"step": 101, "rew')
    (tmp_path / "run" / CONFIG).write_text(to_yaml(compose("quickstart")))
    row = RunsFolder(tmp_path).row("run")
    assert (row["step"], row["total_steps"], row["reward"], row["began"]) == (100, 300, 1.0, 101.0)
    assert row["mode"] == "fully_async"
    assert row["curve"][0] == [1, 0.01] and row["curve"][-1] == [100, 1.0]


def test_the_length_of_a_run_by_epochs_is_that_of_its_newest_command_that_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / CONFIG).write_text(to_yaml(compose("quickstart", ["trainer.max_steps=null", "trainer.epochs=2"])))
    process = {"host": "", "pid": 1, "version": "", "python": "", "config": "", "git": None, "command": []}
    found = [RunsFolder(tmp_path).row("run")["total_steps"]]
    for begun in (
        {"kind": "run", "step": 0, "total_steps": 50},
        {"kind": "resume", "step": 7, "total_steps": 75},
        None,
    ):
        log = EventLog(run / EVENTS, segment_bytes=100)
        log.record("process", **process)
        if begun is not None:
            log.record(**begun)
            log.record("note", text=f'"kind":"run" {"x" * 100}')
        log.close()
        found.append(RunsFolder(tmp_path).row("run")["total_steps"])
    assert found == [None, 50, 75, 75]


def test_the_list_of_runs_reads_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ended", "trains"):
        write_metrics(tmp_path / name, [{"step": 1, "reward/mean": 0.5}])
    runs, read, spread_rows = RunsFolder(tmp_path), [], folders.spread_rows

    def reading(path: Path, count: int) -> list[dict[str, Any]]:
        read.append(path.parent.name)
        return spread_rows(path, count)

    monkeypatch.setattr(folders, "spread_rows", reading)
    assert {row["name"]: row["step"] for row in runs.rows()} == {"ended": 1, "trains": 1}
    assert sorted(read) == ["ended", "trains"]
    with (tmp_path / "trains" / METRICS).open("a") as file:
        file.write('{"step": 2}\n')
    assert {row["name"]: row["step"] for row in runs.rows()} == {"ended": 1, "trains": 2}
    assert read[2:] == ["trains"]


def test_rows_of_many_groups_are_found(tmp_path: Path) -> None:
    rows = [{"step": step, "group_indices": list(range(step * 20_000, (step + 1) * 20_000))} for step in range(1, 5)]
    write_metrics(tmp_path, rows, tail='{"step": 5, "gro')
    assert [row["step"] for row in spread_rows(tmp_path / METRICS, 40)] == [1, 2, 3, 4]
    assert spread_rows(tmp_path / METRICS, 1)[-1]["step"] == 4


@given(st.integers(1, 60), st.integers(0, 200))
def test_rows_spread_over_a_file_contain_its_last_row(count: int, length: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_metrics(Path(directory), [{"step": step, "text": "x" * (step % 50)} for step in range(length)])
        steps = [row["step"] for row in spread_rows(path, count)]
    assert len(steps) <= count + 1
    assert steps == sorted(set(steps))
    assert steps[-1:] == ([length - 1] if length else [])


# Settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_differ_from_the_defaults_are_marked(tmp_path: Path) -> None:
    path = tmp_path / CONFIG
    config = compose("quickstart", ["trainer.seed=7"])
    config.environment.kwargs = {"note": "${a}"}
    path.write_text(to_yaml(config))
    table = {row["key"]: row for row in settings_table(read_settings(path))}
    assert table["trainer.seed"] == {"key": "trainer.seed", "value": 7, "default": 0, "known": True, "differs": True}
    assert not table["generator.max_turns"]["differs"]
    assert table["environment.kwargs.note"]["value"] == "${a}", "as the user wrote it"


def test_a_setting_of_another_version_is_shown_as_unknown() -> None:
    (row,) = settings_table({"trainer": {"of_the_future": [1, {"a": None}]}})
    assert (row["key"], row["value"], row["known"], row["differs"]) == (
        "trainer.of_the_future",
        [1, {"a": None}],
        False,
        True,
    )


@pytest.mark.parametrize(
    "text",
    ["", "- a\n- b\n", "a: [1", "\0", "a: &x [1]\nb: *x\n", "!!python/object/apply:os.getcwd []", "a: " + "[" * 5000],
)
def test_an_unreadable_configuration_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / CONFIG
    path.write_text(text)
    assert read_settings(path) == {}


def test_settings_that_differ_between_runs() -> None:
    rows = differing_settings([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"b": 1}}])
    assert rows == [{"key": "a.c", "values": [2, 3, None]}]


# Curves -----------------------------------------------------------------------------------------------------------


def test_a_table_follows_a_file_that_grows_and_skips_torn_lines(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, [{"step": 1, "a": 0.5}], tail='{"step": 2, "a"')
    table = MetricTable(path)
    assert table.columns()["a"].tolist() == [0.5]
    with path.open("a") as file:
        file.write(': 0.75}\nnot json\n[1]\n{"step": "x"}\n{"step": 3, "b": 1, "text": "no number", "flag": true}\n')
    columns = table.columns()
    assert columns["step"].tolist() == [1, 2, 3]
    assert np.array_equal(columns["a"], [0.5, 0.75, math.nan], equal_nan=True)
    assert np.array_equal(columns["b"], [math.nan, math.nan, 1], equal_nan=True)
    assert set(columns) == {"step", "a", "b"}


def test_steps_that_run_again_replace_the_old_ones(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, [{"step": step, "a": step} for step in (1, 2, 3)])
    table = MetricTable(path)
    table.columns()
    epochs = [table.epoch]
    with path.open("a") as file:
        file.write('{"step": 4, "a": 4}\n')
    assert len(table.columns()["a"]) == 4 and table.epoch == epochs[0]
    with path.open("a") as file:
        file.write('{"step": 2, "a": 20}\n')
    assert table.columns()["a"].tolist() == [1, 20]
    epochs.append(table.epoch)
    replacement = write_metrics(tmp_path / "new", [{"step": 1, "a": 5}])
    os.replace(replacement, path)
    assert table.columns()["a"].tolist() == [5]
    epochs += [table.epoch, MetricTable(path).epoch]
    assert len(set(epochs)) == 4, "nor is the table of a server that was started again the same to a browser"
    path.unlink()
    assert table.columns() == {}


def test_not_a_number_is_a_gap(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path, [], tail='{"step": 1, "a": NaN}\n{"step": 2, "a": Infinity}\n{"step": 3, "a": null}\n'
    )
    answer = json.loads(to_json(curves(MetricTable(path), ["a"])))
    assert answer["step"] == [1, 2, 3]
    assert answer["mean"]["a"] == [None, None, None]


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=70))
def test_points_of_several_rows_have_their_mean_and_extremes(values: list[float]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        table = MetricTable(write_metrics(Path(directory), [{"step": i, "a": value} for i, value in enumerate(values)]))
        answer = curves(table, ["a"], points=8)
        every = answer["every"]
        # Asked again from the second point, the server sends the rest of the same curve.
        rest = curves(table, ["a"], since=1, every=every, points=8)
    assert len(values) / every <= 8 and (every == 1 or len(values) / every > 4)
    parts = [values[start : start + every] for start in range(0, len(values), every)]
    assert answer["step"].tolist() == [min(start + every, len(values)) - 1 for start in range(0, len(values), every)]
    for index, part in enumerate(parts):
        finite = [value for value in part if math.isfinite(value)]
        mean = answer["mean"]["a"][index]
        if not finite:
            assert math.isnan(mean)
        elif every == 1:
            assert mean == finite[0]
        else:
            # Sums of 16 numbers up to 1e6 are exact to 1e-8.
            assert mean == pytest.approx(math.fsum(finite) / len(finite), abs=1e-3)
            assert (answer["min"]["a"][index], answer["max"]["a"][index]) == (min(finite), max(finite))
    assert np.array_equal(rest["mean"]["a"], answer["mean"]["a"][1:], equal_nan=True)
    assert rest["since"] == 1


def test_a_sum_that_some_steps_lack_is_zero_in_them(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": step, "staleness/histogram/0": 15.0, "loss/entropy": 2.0} for step in range(1, 17)
    ]
    for place in range(3, 16, 4):  # weight_sync_interval=4
        rows[place] |= {"time/pause": 4.0, "staleness/histogram/5": 1.0}
        del rows[place]["loss/entropy"]
    names = ["time/pause", "staleness/histogram/", "loss/entropy"]
    table = MetricTable(write_metrics(tmp_path, rows))
    answer = curves(table, names, points=4)
    assert answer["every"] == 4
    for name, (mean, low, high) in {
        "time/pause": (1.0, 0.0, 4.0),
        "staleness/histogram/0": (15.0, 15.0, 15.0),
        "staleness/histogram/5": (0.25, 0.0, 1.0),
        "loss/entropy": (2.0, 2.0, 2.0),  # the mean of those that are known
    }.items():
        assert [answer[part][name].tolist() for part in ("mean", "min", "max")] == [[mean] * 4, [low] * 4, [high] * 4]
    assert np.isnan(
        curves(MetricTable(write_metrics(tmp_path, rows[:12])), names, points=6)["mean"]["time/pause"][::2]
    ).all()


def test_a_client_that_knows_another_resolution_gets_the_whole_curve(tmp_path: Path) -> None:
    table = MetricTable(write_metrics(tmp_path, [{"step": step, "a/b": 1, "c": 2} for step in range(10)]))
    answer = curves(table, ["a/"], since=3, every=2)
    assert (answer["since"], answer["every"], list(answer["mean"]), len(answer["step"])) == (0, 1, ["a/b"], 10)


# HTTP -------------------------------------------------------------------------------------------------------------


def test_what_a_run_says_is_data_never_markup(tmp_path: Path) -> None:
    run = tmp_path / HOSTILE.replace("/", "_").replace("\0", "")
    write_metrics(run, [{"step": 1, HOSTILE: 1.0, "big": 10**400}], tail='{"step": 2, "\\ud800": 1}\n')
    (run / CONFIG).write_text(json.dumps({"trainer": {"mode": HOSTILE, "large": 10**30}}))
    client = client_of(tmp_path)
    answers = [
        client.get("/api/runs"),
        *(
            client.get(f"/api/{what}", params={"run": run.name})
            for what in ("run", "settings", "evaluations", "compare")
        ),
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert answers[0].json()["runs"][0]["mode"] == HOSTILE
    assert HOSTILE in [metric["name"] for metric in answers[1].json()["metrics"]]


@pytest.mark.parametrize(
    "argument",
    [
        "generator.kwargs.endpoint.admin_key=a-key-of-the-endpoint",
        "+generator.kwargs.endpoint={port:8000,admin_key:a-key-of-the-endpoint}",
        """generator.kwargs={endpoint: {"admin_key": 'a-key, of-the-endpoint'}}""",
    ],
)
def test_the_page_shows_the_key_of_the_endpoint_nowhere(
    tmp_path: Path, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-key-of-the-endpoint"
    config = compose("quickstart", [f"generator.kwargs.endpoint.admin_key={key}"])
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "train", argument, "trainer.seed=1"])
    with closing(RunFolder(tmp_path / "run", config)) as folder, recorded_process(folder):
        folder.metrics.append({"step": 1})
    client = client_of(tmp_path)
    for what in ("run", "settings", "incidents", "compare"):
        assert "of-the-endpoint" not in client.get(f"/api/{what}", params={"run": "run"}).text
    (process,) = client.get("/api/incidents", params={"run": "run"}).json()["events"]["processes"]
    assert "(hidden)" in process["command"][2] and process["command"][3] == "trainer.seed=1"


def test_metrics_come_with_their_meaning(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [{"step": 1, "reward/mean": 0.5, "unheard": 1.0}])
    first, second = client_of(tmp_path).get("/api/run", params={"run": "run"}).json()["metrics"]
    assert first["name"] == "reward/mean" and "Mean over the samples" in first["meaning"]
    assert second == {"name": "unheard", "unit": "", "meaning": ""}


def test_what_never_changes_is_shown_last(tmp_path: Path) -> None:
    rows = [{"step": step, "flat": 0.0, "moves": step, "gaps": None if step < 3 else step} for step in range(5)]
    write_metrics(tmp_path / "run", rows)
    metrics = client_of(tmp_path).get("/api/run", params={"run": "run"}).json()["metrics"]
    assert [metric["name"] for metric in metrics] == ["moves", "gaps", "flat"]


@pytest.mark.parametrize(
    "query", ["", "run=run&since=-1", "run=run&since=1e9", "run=run&every=²", "run=run&since=" + "9" * 99]
)
def test_a_bad_parameter_is_an_error_that_names_it(tmp_path: Path, query: str) -> None:
    write_metrics(tmp_path / "run", [{"step": 1}])
    answer = client_of(tmp_path).get(f"/api/metrics?{query}")
    assert answer.status_code == 400
    assert "The parameter" in answer.json()["error"]


def test_the_page_only_reads(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    assert all(client.request(method, "/api/runs").status_code == 405 for method in ("POST", "PUT", "DELETE", "PATCH"))
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/..%2fapp.py").status_code == 404


@pytest.mark.parametrize(("host", "answered"), [
    ("localhost", True), ("localhost:9", True), ("127.0.0.1:7860", True), ("[::1]:7860", True), ("LOCALHOST", True),
    ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example:7860", False), ("[::2]", False),
    ("", False),
])  # fmt: skip
def test_without_a_token_only_this_machines_own_names_are_answered(tmp_path: Path, host: str, answered: bool) -> None:
    assert (client_of(tmp_path).get("/api/runs", headers={"host": host}).status_code == 200) is answered


def test_with_a_token_every_request_needs_it(tmp_path: Path) -> None:
    client = client_of(tmp_path, token="sesame")
    for path in ("/", "/api/runs", "/static/page.js", "/api/live?run=x"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get(f"{path}{'&' if '?' in path else '?'}token=wröng").status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer sesame", "host": "a.example"}).status_code == 200
    entered = client.get("/?token=sesame&x=1")
    assert (entered.status_code, entered.headers["location"]) == (303, "?x=1"), "the token leaves the address"
    assert "HttpOnly" in entered.headers["set-cookie"] and "SameSite=strict" in entered.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200, "by the cookie"


def test_a_token_of_any_characters_is_in_the_address_and_an_empty_one_is_none(tmp_path: Path) -> None:
    client = client_of(tmp_path, token="s+e/s=&a#%m;e")
    assert client.get(address("", "s+e/s=&a#%m;e")).status_code == 303
    assert client.get("/api/runs").status_code == 200, "by the cookie"
    assert client_of(tmp_path, token="").get("/api/runs", headers={"host": "a.example"}).status_code == 403


def test_the_stream_of_changes_ends_for_a_run_that_is_unknown(tmp_path: Path) -> None:
    assert client_of(tmp_path).get("/api/live?run=none").status_code == 404


def test_the_files_of_the_page_are_in_the_package() -> None:
    static = files("skyrl_train.observability.page") / "static"
    page = (static / "index.html").read_text()
    assert "<script>" not in page and " style=" not in page and "http" not in page
    for name in ("preact", "htm", "uplot"):
        assert "opyright" in (static / "vendor" / f"LICENSE.{name}").read_text()


# The command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", str(tmp_path / "none")]) == 2
    assert "There is no run in" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["page", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use. Give another port in --port" in capsys.readouterr().err
    assert main(["page", str(tmp_path), "--port", "70000"]) == 2


@pytest.mark.parametrize(("arguments", "variable", "token"), [
    ([], None, False), ([], "sesame", True), (["--host", "0.0.0.0"], None, True), (["--host", "::1"], None, False),
])  # fmt: skip
def test_an_address_of_other_machines_gets_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    variable: str | None, token: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(TOKEN_VARIABLE, variable)
    assert main(["page", str(tmp_path), "--port", "0", *arguments]) == 0
    printed = capsys.readouterr().out
    assert ("?token=" in printed) is token
    assert variable is None or f"?token={variable}" in printed


# Comparison -------------------------------------------------------------------------------------------------------


def test_runs_are_compared_at_the_budget_that_all_have_reached() -> None:
    steps = np.arange(1.0, 101.0)
    long = {"step": steps, "reward/mean": steps / 100, "elapsed_s": steps * 2, "time/step": np.full(100, 2.0)}
    short = {"step": steps[:50], "reward/mean": np.where(steps[:50] == 50, np.nan, 0.5), "elapsed_s": steps[:50]}
    at = compared([long, short], "step")
    assert at["budget"] == 50 and at["reached"] == [100, 50]
    assert at["runs"][0]["reward"] == pytest.approx(np.mean([0.46, 0.47, 0.48, 0.49, 0.5]), abs=1e-12)  # sums of 5
    assert at["runs"][0]["best"] == 0.5 and at["runs"][0]["step_s"] == 2.0 and at["runs"][0]["steps"] == 50
    assert (at["runs"][1]["reward"], at["runs"][1]["low"], at["runs"][1]["high"]) == (0.5, 0.5, 0.5)
    assert compared([long, short], "elapsed")["runs"][0]["best"] == 0.25
    assert best_run(["a", "b"], at, "step").startswith(
        "At equal steps, b has the highest reward. Its whole interval is above the interval of a."
    )
    assert compared([long, short], "tokens") == {"budget": 0.0, "reached": [0.0, 0.0], "runs": [{}, {}]}


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=40), st.floats(-5, 5))
def test_the_interval_moves_with_its_values_and_lies_between_their_extremes(values: list[float], move: float) -> None:
    low, high = bootstrap_interval(np.array(values))
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    moved = bootstrap_interval(np.array(values) + move)
    # Means of 40 numbers up to 15 are exact to 1e-14.
    assert moved == pytest.approx((low + move, high + move), abs=1e-9)


def test_the_interval_covers_the_mean_of_independent_values_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(size=(200, 200))
    covered = [low <= 0 <= high for low, high in map(bootstrap_interval, draws)]
    # 200 draws of a share of 0.95 spread by 0.015; blocks make the interval a little narrow.
    assert 0.85 < np.mean(covered) < 1.0


def test_the_comparison_over_http(tmp_path: Path) -> None:
    for name, rewards in (("a", [0.1, 0.2, 0.3]), ("b", [0.5])):
        write_metrics(
            tmp_path / name, [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
        )
    client = client_of(tmp_path)
    answer = client.get("/api/compare?run=a&run=b").json()
    assert [run["name"] for run in answer["runs"]] == ["a", "b"]
    assert [run["best"] for run in answer["at"]["runs"]] == [0.1, 0.5]
    assert client.get("/api/compare?run=a&axis=x").status_code == 400


# Incidents --------------------------------------------------------------------------------------------------------


def test_failures_are_counted_by_their_reason(tmp_path: Path) -> None:
    events = tmp_path / "run" / EVENTS
    write_metrics(tmp_path / "run", [{"step": 1}])
    log = EventLog(events)
    for group in range(7):
        log.record("retried", group=group, attempt=1, reason="ValueError: no")
    log.record("failed", group=3, reason="ValueError: no", masked=True)
    log.record("warning", level="WARNING", source="module", text=HOSTILE)
    log.record("buffered", group=4, reward=0.5)
    log.close()
    client = client_of(tmp_path)
    answer = client.get("/api/incidents?run=run").json()["events"]
    counts = {row["kind"]: (row["count"], row["reason"], row["examples"]) for row in answer["failures"]}
    assert counts == {"retried": (7, "ValueError: no", [0, 1, 2, 3, 4]), "failed": (1, "ValueError: no", [3])}
    command = f"skyrl-train try {tmp_path / 'run'} --prompt"
    assert [row["again"] for row in answer["failures"]] == [f"{command} 3", f"{command} 0"]
    assert [row["text"] for row in answer["warnings"]] == [HOSTILE]
    again = EventLog(events)
    again.record("retried", group=9, attempt=1, reason="ValueError: no")
    again.close()
    assert client.get("/api/incidents?run=run").json()["events"]["failures"][0]["count"] == 8


def test_alarms_of_now_and_of_the_past_are_shown(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [{"step": step, "generate/truncated": 0.5} for step in range(1, 13)])
    alarm = {"id": "no-signal", "level": "alarm", "finding": HOSTILE, "action": "Mend it."}
    for states in (("begins", "ends", "begins"), ("begins",)):  # the second process does not end that of the first one
        log = EventLog(tmp_path / "run" / EVENTS)
        log.record("process", host="", pid=1, version="", python="", config="", git=None, command=[])
        for step, state in enumerate(states):
            log.record("alarm", state=state, step=step, **alarm)
        log.close()
    client = client_of(tmp_path)
    (advice,) = client.get("/api/advice?run=run").json()
    assert advice["id"] == "truncated-responses" and advice["level"] == "alarm" and "50%" in advice["finding"]
    assert advice["docs"].endswith("troubleshooting.md#truncated-responses")
    rows = client.get("/api/incidents?run=run").json()["events"]["alarms"]
    assert [(row["step"], row["ended"], row["finding"]) for row in rows] == [
        (0, None, HOSTILE),
        (2, None, HOSTILE),
        (0, 1, HOSTILE),
    ]
    write_metrics(tmp_path / "new", [])
    assert client.get("/api/advice?run=new").json() == []


def test_the_verdict_has_a_sentence_for_learning_speed_and_failures(tmp_path: Path) -> None:
    times = {"time/step": 1.0, "time/train": 0.9}
    write_metrics(tmp_path / "run", [{"step": step, "reward/mean": step / 20, **times} for step in range(1, 21)])
    learning, speed, failures = client_of(tmp_path).get("/api/verdict?run=run").json()
    assert learning.startswith("Learned: reward 0.1 ") and speed.startswith("Bottleneck: training. It takes 90%")
    assert failures == "The run is under way, after step 20. Nothing failed."


def test_failures_that_differ_only_in_prompts_and_numbers_are_counted_together(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS)
    for group, error in enumerate(("3 is not 4", "5 is not 6", "3 is 4")):
        log.record("retried", group=group, attempt=1, reason=f"on prompt 'uid-{group}@{group}': ValueError: {error}")
    log.close()
    found = incidents(EventStore(tmp_path / EVENTS))
    assert found is not None
    assert sorted((row["count"], row["reason"], row["examples"]) for row in found["failures"]) == [
        (1, "on prompt 'uid-2@2': ValueError: 3 is 4", [2]),
        (2, "on prompt 'uid-0@0': ValueError: 3 is not 4", [0, 1]),
    ]


def test_failures_of_one_line_of_code_are_counted_together_whatever_they_say(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS)
    for group, place in enumerate(("reward.py:3 in score", "reward.py:3 in score", "reward.py:9 in score")):
        log.record("failed", group=group, reason=f"bad {'x' * group}", place=place, masked=True)
    log.close()
    found = incidents(EventStore(tmp_path / EVENTS))
    assert found is not None
    rows = sorted((row["count"], row["reason"], row["place"], row["examples"]) for row in found["failures"])
    assert rows == [(1, "bad xx", "reward.py:9 in score", [2]), (2, "bad ", "reward.py:3 in score", [0, 1])]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(tmp_path / "run", [{"step": 1}])

    def refused(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(page_app, "read_jsonl", refused)
    answer = client_of(tmp_path).get("/api/evaluations?run=run")
    assert answer.status_code == 403 and "eval.jsonl" in answer.json()["error"]


def test_the_best_of_compared_runs_is_told_from_noise_where_the_intervals_are_apart() -> None:
    def runs(*rewards: tuple[float, float, float]) -> dict[str, Any]:
        return {"runs": [{"reward": reward, "low": low, "high": high} for reward, low, high in rewards]}

    nan = math.nan
    assert "may be noise" in best_run(["a", "b"], runs((0.5, 0.4, 0.6), (0.55, 0.5, 0.6)), "tokens")
    assert "interval is above the interval of a, c" in best_run(
        ["a", "b", "c"], runs((0.1, 0.0, 0.2), (0.5, 0.4, 0.6), (0.2, 0.1, 0.3)), "elapsed"
    )
    assert "may be noise: an interval needs 3 steps" in best_run(
        ["a", "b"], runs((0.1, nan, nan), (0.5, 0.4, 0.6)), "step"
    )
    assert "fewer than two" in best_run(["a", "b"], {"runs": [{}, {"reward": 0.5, "low": 0.4, "high": 0.6}]}, "step")


def test_a_run_that_was_stopped_or_failed_says_so(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [{"step": 1}])
    process = {"host": "", "pid": 1, "version": "", "python": "", "config": "", "git": None, "command": []}
    for reason in ("stopped", "failed"):
        log = EventLog(tmp_path / "run" / EVENTS)
        log.record("process", **process)
        log.record("end", step=1, reason=reason, error='"kind":"process"')
        log.record("warning", level="ERROR", source="here", text="the run has failed")
        log.close()
        assert RunsFolder(tmp_path).row("run")["state"] == reason
    log = EventLog(tmp_path / "run" / EVENTS)
    log.record("process", **process)
    log.close()
    assert RunsFolder(tmp_path).row("run")["state"] == "live", "another command has opened it"


def test_a_run_has_a_state_while_its_newest_segment_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(tmp_path / "run", [{"step": 1}])
    # The segment that was found is compressed by now.
    monkeypatch.setattr(folders, "_last_segments", lambda folder: [folder / "000001.jsonl"])
    assert RunsFolder(tmp_path).row("run")["state"] == "live"


def test_only_logs_of_the_run_are_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_metrics(run, [{"step": 1}])
    (tmp_path / "secret.log").write_text("secret")
    (run / "logs" / "agents").mkdir(parents=True)
    (run / "logs" / "agents" / "a.log").write_bytes(b"x" * (1 << 17) + b"\nthe \xff end\n")
    (run / "logs" / "events.out.tfevents.1").write_text("no text")
    (run / "logs" / "link.log").symlink_to(tmp_path / "secret.log")
    client = client_of(tmp_path)
    assert [log["name"] for log in client.get("/api/incidents?run=run").json()["logs"]] == ["agents/a.log"]
    read = {name: client.get("/api/log", params={"run": "run", "file": name}).json()["text"] for name in (
        "agents/a.log", "../../secret.log", "link.log", "../config.yaml", "events.out.tfevents.1",
    )}  # fmt: skip
    assert read.pop("agents/a.log") == "the \ufffd end\n"
    assert set(read.values()) == {None}
