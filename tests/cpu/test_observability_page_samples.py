"""The samples on the page: rows of a step, one sequence with its tokens, one prompt over the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from recorded_runs import RecordedRun
from starlette.testclient import TestClient

from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.readers.samples import prompt_rows, recorded_files, step_rows, whole_sequence
from skyrl_train.observability.run_folder import METRICS, SAMPLES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RecordedRun(tmp_path_factory.mktemp("runs") / "run", steps=6, groups=4, samples=4).path


def test_the_newest_step_is_shown_first(run: Path) -> None:
    shown = step_rows(run, "train", 0)
    assert (shown["steps"], shown["step"], shown["phases"]) == ([1, 2, 3, 4, 5, 6], 6, ["train"])
    assert [row["row"] for row in shown["rows"]] == list(range(8))
    assert step_rows(run, "train", 99)["rows"] == step_rows(run, "eval", 1)["rows"] == []


def test_a_row_has_figures_of_its_tokens_but_not_the_tokens(run: Path) -> None:
    table = pyarrow.parquet.read_table(recorded_files(run)["train", 3]).to_pylist()
    for row, whole in zip(step_rows(run, "train", 3)["rows"], table, strict=True):
        trained = [a for a, mask in zip(whole["advantages"], whole["loss_mask"], strict=True) if mask]
        # float32 values up to 1 differ from float64 sums by 1e-7.
        assert row["advantage"] == pytest.approx(sum(trained) / len(trained), abs=1e-5)
        assert row["tokens"] == len(whole["response_token_ids"])
        assert row["turns"] == 1 and "response_token_ids" not in row and "messages" not in row


def test_a_whole_sequence_has_everything(run: Path) -> None:
    table = pyarrow.parquet.read_table(recorded_files(run)["train", 3])
    found = whole_sequence(run, "train", 3, 5)
    assert found is not None
    assert found == table.slice(5, 1).to_pylist()[0]
    assert whole_sequence(run, "train", 3, 8) is None
    assert whole_sequence(run, "train", 99, 0) is None


def test_a_prompt_is_followed_over_the_run(run: Path) -> None:
    rows = prompt_rows(run, "u1")
    assert [row["step"] for row in rows] == [1] * 4 + [3] * 4 + [5] * 4
    assert {row["uid"] for row in rows} == {"u1"}
    assert prompt_rows(run, "none") == []


def test_long_texts_are_cut_in_the_middle(tmp_path: Path, run: Path) -> None:
    table = pyarrow.parquet.read_table(recorded_files(run)["train", 1])
    text = "begin" + "x" * 9000 + "end"
    index = table.schema.get_field_index("response")
    table = table.set_column(index, "response", pyarrow.array([text] * table.num_rows))
    (tmp_path / SAMPLES).mkdir()
    pyarrow.parquet.write_table(table, tmp_path / SAMPLES / "step_000001.parquet")
    shown = step_rows(tmp_path, "train", 1)["rows"][0]["response"]
    assert len(shown) < 300 and shown.startswith("begin") and shown.endswith("end")
    found = whole_sequence(tmp_path, "train", 1, 0)
    assert found is not None and found["response"] == text


def test_a_file_of_another_version_lacks_columns_and_has_others(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).mkdir()
    table = pyarrow.table({"step": [1], "uid": ["u"], "prompt": ["p"], "response": ["r"], "of the future": [1]})
    pyarrow.parquet.write_table(table, tmp_path / SAMPLES / "step_000001.parquet")
    (row,) = step_rows(tmp_path, "train", 1)["rows"]
    assert (row["uid"], row["response"], row["tokens"], row["advantage"], row["reward"]) == ("u", "r", None, None, None)
    found = whole_sequence(tmp_path, "train", 1, 0)
    assert found is not None and found["prompt"] == "p" and found["versions"] is None


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_damaged_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SAMPLES).mkdir()
    (tmp_path / SAMPLES / "step_000001.parquet").write_bytes(content)
    (tmp_path / SAMPLES / ".step_000002.parquet.tmp").write_bytes(content)
    assert step_rows(tmp_path, "train", 0) == {"phases": ["train"], "steps": [1], "step": 1, "rows": []}
    assert prompt_rows(tmp_path, "u") == []
    assert whole_sequence(tmp_path, "train", 1, 0) is None


def test_a_file_that_leads_out_of_the_run_is_not_read(tmp_path: Path, run: Path) -> None:
    (tmp_path / SAMPLES).mkdir()
    (tmp_path / SAMPLES / "step_000001.parquet").symlink_to(recorded_files(run)["train", 1])
    assert recorded_files(tmp_path) == {}


def test_samples_of_versions_without_tokens_are_shown_as_texts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": step, "group_index": 0, "prompt": "p", "response": f"r{step}"} for step in (1, 2)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "resp')
    assert step_rows(tmp_path, "train", 0) == {"phases": ["train"], "steps": [1, 2], "step": 2, "rows": rows[1:]}


def test_samples_over_http(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps=2).path
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / METRICS).touch()
    client = TestClient(create_page(tmp_path), base_url="http://localhost")
    assert client.get("/api/samples?run=run").json()["step"] == 2
    sample = client.get("/api/sample?run=run&phase=train&step=1&row=0").json()
    assert sample["group_index"] == 0 and "request" in {turn["kind"] for turn in sample["turns"]}
    assert client.get("/api/sample?run=run&phase=../../&step=1&row=0").json() is None
    assert len(client.get("/api/prompt?run=run&uid=u0").json()) == len(prompt_rows(run, "u0")) > 0
    assert client.get("/api/samples?run=old").json()["steps"] == []
    assert client.get("/api/sample?run=run&phase=train&step=x").status_code == 400
