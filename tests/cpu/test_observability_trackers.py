"""Trackers: what they get, in which order, and that none of them can stop or slow a run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import tomllib
import tracemalloc
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import RecordedRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from skyrl_train.build.checks import check_import_paths
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import RunConfig
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError
from skyrl_train.observability.run_folder import EVALUATIONS, METRICS, SAMPLES, RunFolder
from skyrl_train.observability.trackers import feed as feeding
from skyrl_train.observability.trackers.backfill import send_run
from skyrl_train.observability.trackers.feed import TrackerFeed, register_tracker, tracker_factory, tracker_names
from skyrl_train.observability.trackers.tracker import (
    MAX_TEXT,
    Tracker,
    flat_config,
    kept_id,
    sample_table,
    split_histograms,
)

HOSTILE = "<script>alert(1)</script>\n| a |\n```\u202e\x1b[31m\0"
PACKAGES = ("wandb", "mlflow", "trackio", "swanlab")


class Recorder(Tracker):
    """Also the target of an import path."""

    made: list[Recorder]

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        self.folder, self.resume_step = folder, resume_step
        self.calls: list[tuple[Any, ...]] = []
        self.location = f"see {folder.name}"
        type(self).made.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append((phase, step, [row["response"] for row in rows]))

    def log_report(self, path: Path) -> None:
        self.calls.append(("report", path.read_text()))

    def close(self) -> None:
        self.calls.append(("close",))


class Failing(Recorder):
    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        raise ValueError("no key at http://name:password@host/x")


@pytest.fixture(autouse=True)
def _no_trackers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "_registered", {})
    Recorder.made = []


def feed_of(run: Path, *trackers: str) -> TrackerFeed:
    config = RunConfig()
    config.trainer.trackers = list(trackers)
    return TrackerFeed(run, config)


def row(group: int, **other: Any) -> dict[str, Any]:
    kept = {"group_index": group, "sample": 0, "reward": 0.5, "lag": 1, "stop_reason": "stop", "chosen": "first"}
    return {**kept, "prompt": "07c=", "response": "ccc", "values": np.zeros(2), **other}


# The feed ---------------------------------------------------------------------------------------------------------


def test_a_tracker_may_be_registered_or_imported(tmp_path: Path) -> None:
    register_tracker("recorder", Recorder)
    assert "recorder" in tracker_names()
    feed = feed_of(tmp_path, "recorder", f"{__name__}.Recorder", f"{__name__}:Recorder")
    feed.begin(5, print)
    feed.log(6, {"loss/policy": 1.0})
    feed.close()
    assert [tracker.calls for tracker in Recorder.made] == [[("log", 6, {"loss/policy": 1.0}), ("close",)]] * 3
    assert sorted((tracker.folder, tracker.resume_step) for tracker in Recorder.made) == [
        (tmp_path / "logs" / name, 5) for name in ("Recorder", "Recorder", "recorder")
    ]
    for name in ("recorder", "wandb"):
        with pytest.raises(ConfigError, match="registered already"):
            register_tracker(name, Recorder)


def test_a_tracker_gets_metrics_samples_evaluations_and_the_report_in_their_order(tmp_path: Path) -> None:
    register_tracker("recorder", Recorder)
    notes: list[str] = []
    feed = feed_of(tmp_path, "recorder")
    feed.log(0, {"before": 1.0})  # no tracker is open yet
    feed.begin(0, notes.append)
    feed.log(1, {"reward/mean": 0.5})
    feed.log_samples("train", 1, [row(3)])
    feed.log(1, {"eval/reward": 0.25})
    feed.log_samples("eval", 1, [row(4, response="d")])
    (tmp_path / "report.html").write_text("<p>ended</p>")
    feed.close()
    feed.close()
    feed.log(2, {"after": 1.0})
    (tracker,) = Recorder.made
    assert tracker.calls == [
        ("log", 1, {"reward/mean": 0.5}),
        ("train", 1, ["ccc"]),
        ("log", 1, {"eval/reward": 0.25}),
        ("eval", 1, ["d"]),
        ("report", "<p>ended</p>"),
        ("close",),
    ]
    assert notes == ["  recorder: see recorder"]


def test_a_password_in_an_address_of_a_tracker_is_neither_shown_nor_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failure = "API request to https://me:se@cr:et@mlflow:5000/api failed"  # as MLflow says it

    class Remote(Recorder):
        def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
            super().__init__(folder, config, resume_step)
            self.location = "postgresql://me:se@cr:et@db:5432/runs?mode=a@b"

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError(failure)

    register_tracker("remote", Remote)
    notes: list[str] = []
    feed = feed_of(tmp_path, "remote")
    feed.begin(0, notes.append)
    feed.log(1, {})
    feed.close()
    shown, failed = notes
    assert shown == "  remote: postgresql://db:5432/runs?mode=a@b"
    assert "API request to https://mlflow:5000/api failed" in failed
    assert caplog.text.count("https://mlflow:5000/api") == 2  # the message and the end of its traceback
    assert "cr:et" not in caplog.text


def test_a_restart_in_the_process_opens_the_trackers_again(tmp_path: Path) -> None:
    register_tracker("recorder", Recorder)
    feed = feed_of(tmp_path, "recorder")
    for step in (0, 4):
        feed.begin(step, print)
        feed.log(step + 1, {})
    feed.close()
    assert [tracker.resume_step for tracker in Recorder.made] == [0, 4]
    assert [tracker.calls for tracker in Recorder.made] == [[("log", 1, {}), ("close",)], [("log", 5, {}), ("close",)]]


def test_a_tracker_that_cannot_be_closed_is_opened_again_all_the_same(tmp_path: Path) -> None:
    class Unclosable(Recorder):
        def close(self) -> None:
            raise OSError("the connection is lost")

    register_tracker("unclosable", Unclosable)
    feed = feed_of(tmp_path, "unclosable")
    for step in (0, 4):
        feed.begin(step, print)
        feed.log(step + 1, {})
    feed.close()
    assert [tracker.calls for tracker in Recorder.made] == [[("log", 1, {})], [("log", 5, {})]]


@pytest.mark.parametrize("error", [ValueError("no key"), SystemExit(3)])
@pytest.mark.parametrize("method", ["__init__", "log", "log_samples", "log_report", "close"])
def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tmp_path: Path, method: str, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    register_tracker("broken", type("Broken", (Recorder,), {method: fail}))
    register_tracker("recorder", Recorder)
    (tmp_path / "report.html").touch()
    notes: list[str] = []
    feed = feed_of(tmp_path, "broken", "recorder")
    feed.begin(0, notes.append)
    for step in (1, 2):
        feed.log(step, {})
        feed.log_samples("train", step, [row(step)])
    feed.close()
    told = [note for note in notes if "broken failed" in note]
    assert len(told) == 1 and type(error).__name__ in told[0]
    (other,) = [tracker for tracker in Recorder.made if tracker.folder.name == "recorder"]
    assert len(other.calls) == 6


def test_a_tracker_that_hangs_costs_its_own_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, released, ended = threading.Event(), threading.Event(), threading.Event()

    class Hanging(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            entered.set()
            released.wait()
            super().log(step, metrics)

        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(feeding, "MAX_PENDING", 3)
    monkeypatch.setattr(feeding, "SILENT_S", -1.0)
    monkeypatch.setattr(feeding, "CLOSE_LIMIT_S", 0.0)
    register_tracker("hanging", Hanging)
    notes: list[str] = []
    feed = feed_of(tmp_path, "hanging")
    feed.begin(0, notes.append)
    feed.log(1, {})
    assert entered.wait(60)
    for step in range(2, 10):
        feed.log(step, {})  # returns, although the tracker takes none of them
    feed.close()  # returns too
    said = ("has not answered", "too slow", "in time")  # each once
    assert [text in note for text, note in zip(said, notes[1:], strict=True)] == [True, True, True]
    released.set()
    assert ended.wait(60)
    assert [call[1] for call in Recorder.made[0].calls] == [1, 2, 3, 4]


def test_a_feed_that_was_closed_begins_again_even_while_a_tracker_of_before_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released, ended = threading.Event(), threading.Event(), threading.Event()

    class HangingAtFirst(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 1:
                entered.set()
                released.wait()
            super().log(step, metrics)

        def close(self) -> None:
            super().close()
            if self.resume_step == 0:
                ended.set()

    register_tracker("hanging", HangingAtFirst)
    feed = feed_of(tmp_path, "hanging")
    feed.close()
    feed.begin(0, print)
    feed.log(1, {})
    assert entered.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(feeding, "CLOSE_LIMIT_S", 0.0)
        feed.close()
    feed.begin(1, print)
    feed.log(2, {})
    feed.close()
    first, second = Recorder.made
    assert second.calls == [("log", 2, {}), ("close",)] and first.calls == []
    released.set()
    assert ended.wait(60)
    assert first.calls == [("log", 1, {}), ("close",)]


def test_ctrl_c_at_the_end_of_a_run_ends_only_the_wait_for_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    register_tracker("recorder", Recorder)
    feed = feed_of(tmp_path, "recorder")
    feed.begin(0, print)
    (thread,) = feed._threads
    with monkeypatch.context() as patch:
        patch.setattr(feeding._TrackerThread, "join", interrupted)
        feed.close()
    thread._thread.join()  # otherwise it may open its tracker in the next test
    assert "interrupted while trackers take the end" in caplog.text


# Before the run starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "Did you mean tensorboard"),
        ("no_such_package.Tracker", "cannot be imported"),
        ("json.NoSuchTracker", "cannot be imported"),
    ],
)
def test_an_unknown_tracker_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        feed_of(tmp_path, name)
    with pytest.raises(ConfigError, match=message):
        check_import_paths(compose("quickstart", [f"trainer.trackers=[{name}]"]))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_refused_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install {name} .*--extra {name}"):
        tracker_factory(name)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(name in requirement for requirement in extras["optional-dependencies"][name])


# Shared by several trackers ----------------------------------------------------------------------------------------


def test_an_id_is_kept_and_a_torn_one_is_replaced(tmp_path: Path) -> None:
    first = kept_id(tmp_path / "wandb")
    assert kept_id(tmp_path / "wandb") == first != kept_id(tmp_path / "swanlab")
    (tmp_path / "wandb" / "run_id").write_text("")
    assert kept_id(tmp_path / "wandb", lambda: "other") == "other" == kept_id(tmp_path / "wandb")


@given(st.lists(st.integers(0, 20), min_size=1))
def test_a_histogram_has_the_counts_of_its_values(lags: list[int]) -> None:
    metrics = {f"staleness/histogram/{lag}": float(lags.count(lag)) for lag in lags}
    scalars, histograms = split_histograms({"staleness/mean": 1.0, **metrics})
    assert scalars == {"staleness/mean": 1.0}
    counts, edges = histograms["staleness/histogram"]
    assert counts.tolist() == np.histogram(lags, edges)[0].tolist() and sum(counts) == len(lags)


def test_samples_are_cut_in_the_middle_and_have_valid_text() -> None:
    (shown,) = sample_table([row(1, prompt="a" * MAX_TEXT + "b", response="\udcff")])
    assert "values" not in shown
    assert len(shown["prompt"]) < MAX_TEXT + 5 and shown["prompt"][-1] == "b"
    assert json.loads(json.dumps(shown)) == shown and shown["response"].encode() == b"?"


def test_settings_have_their_dotted_names() -> None:
    settings = flat_config(compose("quickstart", ["trainer.seed=7"]))
    assert settings["trainer.seed"] == 7 and settings["trainer.mode"] == "fully_async"
    key = "generator.kwargs.endpoint.admin_key"
    assert flat_config(compose("quickstart", [f"{key}=a-key-of-the-endpoint"]))[key] == "(hidden)"


# A run that is sent afterwards ------------------------------------------------------------------------------------


def test_a_run_is_sent_afterwards_in_the_order_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path / "runs" / "killed-1", steps=3).path
    with (run / METRICS).open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.25, "loss/policy": null, "group_indices": [1]}\n{"step": 4, "rew')
    (run / EVALUATIONS).write_text('{"step": 2, "policy_version": 2, "time": 9.0, "eval/pass@1": 0.5}\n')
    (run / SAMPLES / "step_000002.parquet").write_bytes(b"damaged")
    name = f"{__name__}:Recorder"
    assert main(["track", str(run), name]) == 0
    (sent,) = Recorder.made
    assert sent.folder == run / "logs" / "Recorder"
    order = [("log", 1), ("train", 1), ("log", 2), ("log", 2), ("log", 3), ("train", 3), ("close",)]
    assert [call[:2] for call in sent.calls] == order
    evaluation, step_2, step_3 = (call[2] for call in sent.calls if call[0] == "log" and call[1] > 1)
    assert (evaluation, step_3) == ({"eval/pass@1": 0.5}, {"reward/mean": 0.25})
    assert "reward/mean" in step_2 and not step_2.keys() & {"step", "time", "elapsed_s"}
    assert len(sent.calls[1][2]) > 2, "samples"
    # Once more only if that was meant; elsewhere, if the run folder is read-only.
    (run / "logs" / "Recorder").mkdir(parents=True)
    (run / "logs" / "Recorder" / "run_id").write_text("x")
    assert main(["track", str(run), name]) == 2
    assert "--again" in capsys.readouterr().err
    assert main(["track", str(run), name, "--again"]) == 0
    assert main(["track", str(run), name, "--output", str(tmp_path / "elsewhere")]) == 0
    assert Recorder.made[-1].folder == tmp_path / "elsewhere" / "killed-1" / "logs" / "Recorder"


def test_a_long_run_is_sent_without_all_its_rows_in_memory(tmp_path: Path) -> None:
    class Counting(Tracker):
        steps = 0

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            self.steps += 1
            assert (step, metrics) == (self.steps, {"reward/mean": 0.5})

        def close(self) -> None:
            pass

    row = '{"step": %d, "reward/mean": 0.5, "group_indices": [%s1]}\n'
    (tmp_path / METRICS).write_text("".join(row % (step, "1, " * 3000) for step in range(1, 801)))
    tracker = Counting()
    tracemalloc.start()
    send_run(tmp_path, tracker)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tracker.steps == 800 and (tmp_path / METRICS).stat().st_size > 7_000_000 > 10 * peak


def test_a_run_that_cannot_be_sent_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path / "run-1", steps=1).path
    for arguments, message in (
        (["no_such"], "'no_such' is unknown"),
        ([f"{__name__}:Failing"], "Failing failed: ValueError: no key at http://host/x. Its files are in"),
    ):
        assert main(["track", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    with closing(RunFolder(tmp_path / "run-2", compose("quickstart", []))):
        assert main(["track", str(tmp_path / "run-2"), "tensorboard", "mlflow"]) == 2
    assert "trains now" in (said := capsys.readouterr().err) and "with trainer.trackers=[tensorboard,mlflow]." in said


# TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        feed = feed_of(tmp_path / "quickstart-1", "tensorboard")
        feed.begin(resume_step, pytest.fail)
        for step in steps:
            lags = {"staleness/histogram/0": 3.0, "staleness/histogram/2": 1.0}
            feed.log(step, {"reward/mean": 10.0 * resume_step + step, "loss/policy": float("nan"), **lags})
            feed.log_samples("train", step, [row(step, prompt=HOSTILE)])
        feed.close()
    (folder,) = (tmp_path / "quickstart-1" / "logs" / "tensorboard").iterdir()
    assert folder.name == "quickstart-1"  # which TensorBoard shows as the name of the run
    events = EventAccumulator(str(folder)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
    assert "staleness/histogram/0" not in events.Tags()["scalars"]
    written = [event for file in sorted(folder.glob("events*")) for event in EventFileLoader(str(file)).Load()]
    of_steps = [event.step for event in written if any(value.tag == "reward/mean" for value in event.summary.value)]
    assert sorted(of_steps) == [1, 2, 3, 3, 4]
    for event in written:
        tags = {value.tag for value in event.summary.value}
        assert ("loss/policy" in tags) == ("reward/mean" in tags), "one record for the step"
    lags = events.Histograms("staleness/histogram")[-1].histogram_value
    assert (lags.num, lags.min, lags.max, list(lags.bucket)[-3:]) == (4.0, -0.5, 2.5, [3.0, 0.0, 1.0])
    assert {event.step for event in events.Tensors("samples/train/text_summary")} == {1, 2, 3, 4}
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert layout.index(b"reward/mean") < layout.index(b"loss/entropy") < layout.index(b"time/step")


# Other packages, offline -------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from skyrl_train.config.compose import compose
from skyrl_train.observability.trackers.backfill import send_run
from skyrl_train.observability.trackers.feed import TrackerFeed

run, name, text = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
row = {"group_index": 3, "sample": 0, "reward": 0.5, "lag": 1, "stop_reason": "stop", "chosen": "first", "prompt": text}
odd = dict.fromkeys(["environment/", "environment//a/../b c", "environment/" + 300 * "x"], 1.0)  # by a user's environment
for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    config = compose("quickstart", [f"trainer.trackers=[{name}]"])
    config.trainer.policy.optimizer_config.lr_multipliers = {"/layers//0/": 0.5}
    feed = TrackerFeed(run, config)
    feed.begin(resumed, lambda note: print("NOTE", note, flush=True))
    for step in steps:
        lags = {"staleness/histogram/0": 3.0, "staleness/histogram/2": 1.0}
        feed.log(step, {"reward/mean": resumed + step / 10, "loss/policy": float("nan"), **lags, **odd})
        feed.log_samples("train", step, [{**row, "response": f"answer {step}"}])
    feed.log(2, {"eval/pass@1": 0.25})
    if resumed:
        (run / "report.html").write_text("<p>report</p>")
    feed.close()
"""


TRACKIO_ROWS = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("skyrl-train", sys.argv[1])))
"""


def tracked(tmp_path: Path, name: str, limit_s: float = 300.0) -> Path:
    """Track a run that is resumed, with the real package in another process, and return the tracker's folder."""
    pytest.importorskip(name, reason=f"pip install {name}")
    # No key, no network, and nothing of the user's home.
    own = {key: value for key, value in os.environ.items() if not key.startswith(tuple(p.upper() for p in PACKAGES))}
    own |= {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    own |= {f"{kind}_PROXY": "http://127.0.0.1:9" for kind in ("HTTP", "HTTPS")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "quickstart-1"), name, HOSTILE.replace("\0", "")]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=limit_s, check=True, cwd=tmp_path)
    assert "NOTE" in done.stdout
    assert "failed" not in done.stdout and "in time" not in done.stdout, done.stdout + done.stderr
    (tmp_path / "notes").write_text(done.stdout)
    return tmp_path / "quickstart-1" / "logs" / name


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    folder = tracked(tmp_path, "wandb")
    name = (folder / "run_id").read_text()
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert [run.name.rpartition("-")[2] for run in runs] == [name, name]
    assert f"wandb sync {folder / 'wandb'}\n" in (tmp_path / "notes").read_text()
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(folder / "wandb")]
    listed = subprocess.run(
        command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert "Would sync 2 run(s)" in listed.stdout + listed.stderr
    tables = [[json.loads(file.read_text()) for file in run.rglob("train_*.table.json")] for run in runs]
    answers = [sorted(table["data"][0][-1] for table in some) for some in tables]
    assert answers == [["answer 1", "answer 2", "answer 3"], ["answer 3", "answer 4"]]
    content = b"".join(path.read_bytes() for run in runs for path in run.glob("*.wandb"))
    for text in ("reward/mean", "eval/pass@1", "trainer.max_steps", "staleness/histogram", f"report-{name}"):
        assert text.encode() in content


@pytest.mark.slow
def test_mlflow_offline(tmp_path: Path) -> None:
    folder = tracked(tmp_path, "mlflow")
    with sqlite3.connect(folder / "mlflow.db") as database:
        (run,) = database.execute("select run_uuid, name, status from runs").fetchall()
        assert run == ((folder / "run_id").read_text(), "quickstart-1", "FINISHED")
        points = database.execute("select step, value from metrics where key = 'reward/mean' order by timestamp, step")
        assert sorted(points) == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 2.3), (4, 2.4)]
        assert database.execute("select value from metrics where key = 'eval/pass_at_1'").fetchone() == (0.25,)
        assert database.execute("select value from params where key = 'trainer.mode'").fetchall() == [("fully_async",)]
    names = {path.name for path in (folder / "artifacts").rglob("*.*")}
    assert names == {"report.html", *(f"train_{step:06}.json" for step in (1, 2, 3, 4))}


@pytest.mark.slow
def test_trackio_offline(tmp_path: Path) -> None:
    folder = tracked(tmp_path, "trackio")
    name = f"quickstart-1-{(folder / 'run_id').read_text()[:6]}"
    rows = json.loads(
        subprocess.run(
            [sys.executable, "-c", TRACKIO_ROWS, name],
            env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert [(r["step"], r["reward/mean"]) for r in rows if "reward/mean" in r] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (3, 2.3), (4, 2.4)
    ]  # fmt: skip
    tables = [json.dumps(r["samples/train"]) for r in rows if "samples/train" in r]
    assert [f"answer {step}" in table for step, table in zip((1, 2, 3, 3, 4), tables, strict=True)] == [True] * 5
    with sqlite3.connect(tmp_path / "trackio" / "skyrl-train.db") as database:
        assert "trainer.max_steps" in str(database.execute("select config from configs").fetchone()[0])
        assert database.execute("select type from artifacts").fetchall() == [("report",)]


@pytest.mark.slow
def test_swanlab_offline(tmp_path: Path) -> None:
    folder = tracked(tmp_path, "swanlab")
    name = (folder / "run_id").read_text()
    runs = sorted(folder.glob("run-*-*"))
    assert [run.name.rpartition("-")[2] for run in runs] == [name, name]
    first, second = (next(run.glob("*.swanlab")).read_bytes() for run in runs)
    for text in ("reward/mean", "eval/pass@1", "samples/train"):
        assert text.encode() in first
    assert b"report.html" in second
    assert "max_steps" in (runs[0] / "files" / "config.yaml").read_text()
