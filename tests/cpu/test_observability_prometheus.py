"""Metrics for Prometheus, and the dashboard and the alerts that read them."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery
from prometheus_client.parser import text_string_to_metric_families
from recorded_runs import RecordedRun
from starlette.testclient import TestClient

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.events import reader
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.metrics import declared
from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.page.prometheus import EXPORTED_S
from skyrl_train.observability.readers import timeline
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, METRICS

DEPLOY = Path(__file__).parents[2] / "deploy" / "grafana"


def write_run(run: Path, *rows: dict[str, Any], tail: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def record_engine(run: Path, engine: int, state: str) -> None:
    seconds = itertools.count()
    events = EventLog(run / EVENTS, clock=lambda: float(next(seconds)))
    facts = {"version": 3, "running": 5, "waiting": None, "paused": False, "prefill_tokens": 0, "busy_s": 1.0}
    facts |= {"kv_cache_usage": 0.5 if engine == 0 else None}  # the embedded engine's has no fixed size
    for generated in (0, 100):
        events.record("engine", engine=engine, state=state, generated_tokens=generated, **facts)
    events.close()


def scraped(root: Path) -> dict[tuple[str, ...], float]:
    """Return the values of /metrics by name and labels other than the mode."""
    text = TestClient(create_page(root), base_url="http://localhost:7860").get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "mode"))
            assert key not in found  # Prometheus refuses the whole page otherwise
            found[key] = sample.value
    return found


def test_the_newest_row_of_a_run_its_evaluation_and_its_engines_are_exported(tmp_path: Path) -> None:
    now = time.time()
    rows = [{"step": step, "time": now + step, "time/step": float(step), "elapsed_s": 9.0} for step in (1, 2, 9)]
    lags = {"staleness/histogram/0": 3.0, "staleness/histogram/2": 1.0}
    more = {"reward/mean": 0.5, "policy/tokens_total": 70, "group_indices": [1], "off_policy/ess": None, **lags}
    write_run(tmp_path / "a-1", *rows[:2], {**rows[2], **more}, tail='{"step": 10, "rew')
    (tmp_path / "a-1" / EVALUATIONS).write_text('{"step": 4, "policy_version": 4, "eval/pass@1": 0.25}\n')
    (tmp_path / "a-1" / CONFIG).write_text(to_yaml(compose("quickstart")))
    record_engine(tmp_path / "a-1", 0, "healthy")
    record_engine(tmp_path / "a-1", 1, "suspect")
    found = scraped(tmp_path)
    assert math.isnan(found.pop(("skyrl_train_off_policy_ess", "a-1")))
    assert found.pop(("skyrl_train_engine_tokens_per_second", "0", "a-1")) > 0
    assert found.pop(("skyrl_train_engine_tokens_per_second", "1", "a-1")) > 0
    assert found == {
        ("skyrl_train_run_info", "a-1", "live"): 1,
        ("skyrl_train_step", "a-1"): 9,
        ("skyrl_train_total_steps", "a-1"): 300,
        ("skyrl_train_elapsed_seconds", "a-1"): 9,
        ("skyrl_train_max_staleness_steps", "a-1"): compose("quickstart").trainer.fully_async.max_staleness_steps,
        ("skyrl_train_last_step_timestamp_seconds", "a-1"): now + 9,
        ("skyrl_train_median_step_seconds", "a-1"): 2,
        ("skyrl_train_time_step", "a-1"): 9,
        ("skyrl_train_reward_mean", "a-1"): 0.5,
        ("skyrl_train_policy_tokens_total", "a-1"): 70,
        ("skyrl_train_staleness_groups", "a-1", "0"): 3,
        ("skyrl_train_staleness_groups", "a-1", "1"): 0,
        ("skyrl_train_staleness_groups", "a-1", "2"): 1,
        ("skyrl_train_eval_pass_1", "a-1"): 0.25,
        ("skyrl_train_engine_info", "0", "a-1", "healthy"): 1,
        ("skyrl_train_engine_info", "1", "a-1", "suspect"): 1,
        ("skyrl_train_engine_policy_version", "0", "a-1"): 3,
        ("skyrl_train_engine_policy_version", "1", "a-1"): 3,
        ("skyrl_train_engine_running_requests", "0", "a-1"): 5,
        ("skyrl_train_engine_running_requests", "1", "a-1"): 5,
        ("skyrl_train_engine_kv_cache_usage", "0", "a-1"): 0.5,
    }


def test_engines_of_commands_that_have_ended_are_not_exported(tmp_path: Path) -> None:
    process = {"host": "", "pid": 1, "version": "", "python": "", "config": "", "git": None, "command": []}
    write_run(tmp_path / "a-1", {"step": 1})
    for engines in ((0, 1), (0,)):  # resumed with fewer of them
        events = EventLog(tmp_path / "a-1" / EVENTS)
        events.record("process", **process)
        for engine in engines:
            facts = {"version": 3, "running": 5, "waiting": 0, "paused": False, "prefill_tokens": 0, "busy_s": 1.0}
            events.record("engine", engine=engine, state="dead", generated_tokens=9, kv_cache_usage=None, **facts)
        events.close()
    assert {key for key in scraped(tmp_path) if "engine" in key[0]} == {
        ("skyrl_train_engine_info", "0", "a-1", "dead"),
        *(
            (f"skyrl_train_engine_{fact}", "0", "a-1")
            for fact in ("policy_version", "running_requests", "waiting_requests")
        ),
    }
    for path in (tmp_path / "a-1").rglob("*.*"):  # killed
        os.utime(path, (time.time() - 300,) * 2)
    assert ("skyrl_train_run_info", "a-1", "silent") in scraped(tmp_path)
    assert not any("engine" in key[0] for key in scraped(tmp_path))


def test_damaged_and_foreign_runs_do_not_spoil_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good", {"step": 1, "reward/mean": 0.5})
    write_run(tmp_path / "torn", tail='{"step": 1, "reward/me')
    row = {
        "step": 10**400,
        "a/b": 10**400,
        "a-b": 1.0,
        "a_b": 2.0,
        "flag": True,
        "text": "x",
        "histogram/99999999": 1.0,
    }
    write_run(tmp_path / 'odd "name"\\\n{}', row)
    (tmp_path / 'odd "name"\\\n{}' / CONFIG).write_text("trainer: [1, 2]")
    write_run(tmp_path / "old", {"step": 1, "reward/mean": 0.25})
    os.utime(tmp_path / "old" / METRICS, (time.time() - EXPORTED_S - 9,) * 2)
    found = scraped(tmp_path)
    assert found["skyrl_train_reward_mean", "good"] == 0.5
    assert found["skyrl_train_a_b", 'odd "name"\\\n{}'] in (1, 2)
    assert not any("flag" in key[0] or "text" in key[0] or "old" in key for key in found)


def test_a_scrape_of_many_runs_reads_what_was_written_since_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 20
    for number in range(runs):
        RecordedRun(tmp_path / f"run-{number}", steps=8, groups=2, samples=2, segment_bytes=4000)
    client = TestClient(create_page(tmp_path), base_url="http://localhost")
    first = client.get("/metrics").text
    read, content_of = [0], timeline.segment_content

    def content(path: Path, limit: int | None = None) -> bytes:
        read[0] += 1
        return content_of(path, limit)

    monkeypatch.setattr(timeline, "segment_content", content)
    monkeypatch.setattr(reader, "segment_content", content)
    assert client.get("/metrics").text == first
    assert read[0] == runs, "of each run the newest segment"


def test_an_empty_folder_has_an_empty_page_and_the_token_is_needed(tmp_path: Path) -> None:
    assert scraped(tmp_path) == {}
    client = TestClient(create_page(tmp_path, token="secret"), base_url="http://node7:7860")
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer secret"}).status_code == 200


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported(tmp_path: Path) -> None:
    names = [name for name in declared() if not name.endswith("/")]
    write_run(tmp_path / "a-1", {"step": 1, "time": 1.0, "elapsed_s": 1.0, **dict.fromkeys(names, 1.0)})
    (tmp_path / "a-1" / CONFIG).write_text(to_yaml(compose("quickstart")))
    record_engine(tmp_path / "a-1", 0, "healthy")
    exported = {key[0] for key in scraped(tmp_path)} | {"skyrl_train_engine_waiting_requests"}
    for file in ("skyrl-train.json", "alerts.yaml"):
        used = set(re.findall(r"\bskyrl_train_\w+", (DEPLOY / file).read_text()))
        assert used and used <= exported


def test_the_dashboard_opens_on_the_reward_and_its_panels_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "skyrl-train.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells and max(x for x, _ in own) < 24
        cells |= own
        assert all('{run=~"$run"}' in target["expr"] for target in panel["targets"])
    assert next(panel["title"] for panel in panels if panel["type"] == "timeseries") == "Does it learn? Reward"


def lost_in(given: Any, read: Any, path: str = "") -> list[str]:
    """The paths in ``given`` that ``read`` lacks or has with another value."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [lost for key, value in given.items() for lost in lost_in(value, read.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            lost
            for place, pair in enumerate(zip(given, read, strict=True))
            for lost in lost_in(*pair, f"{path}.{place}")
        ]
    return [] if given == read else [path]


def test_the_dashboard_has_grafanas_types_and_none_of_its_fields_is_unknown_to_them() -> None:
    register_default_plugins()
    dashboard = json.loads((DEPLOY / "skyrl-train.json").read_text())

    def lost() -> list[str]:
        return lost_in(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard))))

    assert lost() == []
    for panel in Dashboard.from_json(dashboard).panels:  # what is of no known type is kept as a dict
        assert type(panel.options).__module__ == f"grafana_foundation_sdk.models.{panel.type_val}"
        assert all(isinstance(target, Dataquery) for target in panel.targets)
    sources = [source for panel in dashboard["panels"] for source in (panel, *panel["targets"])]
    assert all(source["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    dashboard["panels"][0]["options"]["colourMode"] = dashboard["panels"][1]["targets"][0]["expression"] = "up"
    assert lost() == [".panels.0.options.colourMode", ".panels.1.targets.0.expression"], "this check finds mistakes"


def test_prometheus_understands_each_expression_of_the_dashboard(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    panels = json.loads((DEPLOY / "skyrl-train.json").read_text())["panels"]
    variables = {"$run": "a-1", "$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}
    rules = []
    for place, expression in enumerate(target["expr"] for panel in panels for target in panel["targets"]):
        for name, value in variables.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"panel:{place}", "expr": expression})
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = "".join(f',{key}="{value}"' for key, value in labels.items())
    return {"series": f'skyrl_train_{name}{{instance="i",job="j",run="a-1"{inner}}}', "values": values}


LIVE = series("run_info", "1x20", state="live", mode="sync")
# A case per alert: the series that fire it, those that do not, and the minute at which it is looked at.
ALERTS: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], int]] = {
    "NoStep": (
        [LIVE, series("last_step_timestamp_seconds", "0x20"), series("median_step_seconds", "60x20")],
        [LIVE, series("last_step_timestamp_seconds", "0x20"), series("median_step_seconds", "600x20")],
        6,
    ),
    "NoFirstStep": (
        [series("run_info", "1x40", state="live")],
        [series("run_info", "1x40", state="live"), series("last_step_timestamp_seconds", "0x40")],
        31,
    ),
    "RunSilent": ([series("run_info", "1x20", state="silent")], [LIVE], 3),
    "RunFailed": ([series("run_info", "1x20", state="failed")], [series("run_info", "1x20", state="stopped")], 1),
    "RewardNotANumber": ([series("reward_mean", "NaN NaN")], [series("reward_mean", "0x20")], 1),
    "EnginesUnhealthy": (
        [LIVE, series("engine_info", "1x20", engine="0", state="dead")],
        [LIVE, *(series("engine_info", "1x20", engine=state, state=state) for state in ("healthy", "retired"))],
        3,
    ),
    "LagAboveBound": (
        [series("staleness_max", "5x20"), series("max_staleness_steps", "4x20")],
        [series("staleness_max", "4x20"), series("max_staleness_steps", "4x20")],
        6,
    ),
    "DiskAlmostFull": (
        [series("system_disk_free_bytes", "19x20"), series("system_checkpoint_bytes", "10x20")],
        [series("system_disk_free_bytes", "20x20"), series("system_checkpoint_bytes", "10x20")],
        1,
    ),
}


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == list(ALERTS)
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    cases = []
    for rule in rules:
        firing, quiet, minute = ALERTS[rule["alert"]]
        for given, fires in ((firing, True), (quiet, False)):
            # As in test data, the value of an expression that is 1 where the alert fires.
            count = {
                "expr": f'count(ALERTS{{alertname="{rule["alert"]}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
            }
            expected = [{"labels": "{}", "value": 1}] if fires else []
            cases.append(
                {"interval": "1m", "input_series": given, "promql_expr_test": [{**count, "exp_samples": expected}]}
            )
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
