"""Prompts from files that are read as they are needed."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import harness
import pyarrow as pa
import pytest
import torch
from harness import Harness
from pyarrow import parquet

from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.inputs import load_inputs
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, ConfigError, DataError
from skyrl_train.rollout.data import streaming
from skyrl_train.rollout.data.dataset import RecordMaker, Row, load_dataset, open_rows
from skyrl_train.rollout.data.loader import PromptLoader, open_prompts
from skyrl_train.rollout.data.prompt_limit import PromptLimit
from skyrl_train.rollout.data.streaming import CHUNK_ROWS, ROWS_AHEAD, StreamingPrompts
from skyrl_train.runtime.concurrency import Signal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of data sets for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{row}=", "answer": str(row)} for row in range(count)]


def write_all_kinds(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows as .jsonl (with blank lines), .parquet (in several row groups), saved folder, .csv, and folder of the hub."""
    lines, table, saved = folder / "lines.jsonl", folder / "table.parquet", folder / "saved"
    lines.write_text("".join("\n" * (number % 3 == 1) + json.dumps(row) + "\n" for number, row in enumerate(rows)))
    parquet.write_table(pa.Table.from_pylist(rows), table, row_group_size=7)
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    comma, hub = folder / "comma.csv", folder / "hub"
    with comma.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    hub.mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), hub / "train-00000-of-00001.parquet")
    return [lines, table, saved, comma, hub]


def stream(paths: Sequence[Path], epochs: int = 1, maker: RecordMaker | None = None) -> StreamingPrompts:
    return StreamingPrompts(map(str, paths), maker or RecordMaker("prompt", "run_length"), epochs)


class Reader:
    """A loader with what a caller needs in order to wait for it."""

    def __init__(self, prompts: StreamingPrompts) -> None:
        self.loader = PromptLoader(prompts, seed=0)
        self.changed = Signal()
        self.started = False

    async def start(self) -> None:
        if not self.started:
            self.started = True
            await self.loader.source.start(self.changed.notify)

    async def issue(self) -> int | None:
        await self.changed.wait_until(lambda: self.loader.ready)
        return self.loader.issue()

    async def read(self, count: int | None = None) -> list[PromptRecord]:
        """The next prompts, settled at once; all that are left without ``count``."""
        await self.start()
        records: list[PromptRecord] = []
        while len(records) != count and (group_index := await self.issue()) is not None:
            records.append(self.loader.source.record(group_index))
            self.loader.settle([group_index], "trained")
        return records


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("start", [0, 1, 6, 7, 20, 22])
def test_a_file_can_be_read_from_any_row_on(tmp_path: Path, kind: int, start: int) -> None:
    file = open_rows(str(write_all_kinds(tmp_path, rows_of(23))[kind]))
    rows = list(file.rows())
    assert [row.value for row in rows] == rows_of(23)
    assert list(file.rows(rows[start].next)) == rows[start + 1 :]


async def test_a_stream_has_the_records_of_the_data_set_in_its_order_epoch_after_epoch(tmp_path: Path) -> None:
    paths = [str(path) for path in write_all_kinds(tmp_path, rows_of(50))]
    config = compose(
        "quickstart",
        [f"data.train_data=[{','.join(paths)}]", "data.streaming=true", "trainer.epochs=2", "trainer.max_steps=99"],
    )
    in_memory = load_dataset(config.data, config.environment)
    prompts = open_prompts(config)
    assert isinstance(prompts, StreamingPrompts)
    reader = Reader(prompts)
    assert await reader.read() == [*in_memory, *in_memory]
    assert reader.loader.source.end == 2 * len(in_memory)
    assert reader.loader.issue() is None, "the end is for good"
    await reader.loader.source.aclose()


async def test_a_row_that_is_still_being_read_does_not_block_the_event_loop(tmp_path: Path) -> None:
    may_read = threading.Event()

    class Slow(RecordMaker):
        def make(self, row: Row, index: int, stem: str) -> PromptRecord:
            if index == CHUNK_ROWS:
                assert may_read.wait(60)
            return super().make(row, index, stem)

    reader = Reader(stream(write_all_kinds(tmp_path, rows_of(2 * CHUNK_ROWS))[:1], maker=Slow("prompt", "run_length")))
    assert len(await reader.read(CHUNK_ROWS)) == CHUNK_ROWS
    assert not reader.loader.ready and reader.loader.source.end is None
    with pytest.raises(RuntimeError, match="still being read"):
        reader.loader.issue()
    waiting = asyncio.create_task(reader.issue())
    await asyncio.sleep(0)
    assert not waiting.done()
    may_read.set()
    assert await waiting == CHUNK_ROWS, "the loop is told when the row is there"
    await reader.loader.source.aclose()


async def test_little_is_read_ahead_and_little_is_kept_however_long_the_stream(tmp_path: Path) -> None:
    read = 0

    class Counting(RecordMaker):
        def make(self, row: Row, index: int, stem: str) -> PromptRecord:
            nonlocal read
            read += 1
            return super().make(row, index, stem)

    rows = 20 * ROWS_AHEAD
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(rows)))
    prompts = stream([path], maker=Counting("prompt", "run_length"))
    reader = Reader(prompts)
    await reader.start()
    held: list[int] = []  # a window of prompts in flight
    for _ in range(rows - ROWS_AHEAD):
        group_index = await reader.issue()
        assert group_index is not None
        held.append(group_index)
        assert read <= group_index + 1 + ROWS_AHEAD + CHUNK_ROWS
        if len(held) > 100:
            reader.loader.settle([held.pop(0)], "trained")
    assert len(prompts._records) <= len(held) + ROWS_AHEAD + CHUNK_ROWS
    assert len(prompts._marks) <= (len(held) + ROWS_AHEAD) // CHUNK_ROWS + 3
    assert len(json.dumps(reader.loader.state_dict())) < 2000
    await reader.loader.source.aclose()


async def test_reading_leaves_the_random_numbers_of_training_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    reader = Reader(stream(write_all_kinds(tmp_path, rows_of(40))))
    await reader.read()
    reader.loader.state_dict()
    await reader.loader.source.aclose()
    assert torch.equal(torch.get_rng_state(), before)


async def test_a_broken_row_is_an_error_once_its_turn_comes(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    good = 2 * CHUNK_ROWS + 5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(good)) + "{")
    reader = Reader(stream([path]))
    assert len(await reader.read(good)) == good
    with pytest.raises(DataError, match=rf"broken\.jsonl:{good + 1} is not JSON"):
        await reader.issue()
    await reader.loader.source.aclose()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"prompt": 7}\n', "must be a string or a list of messages"),
        ('{"prompt": "1", "env_class": "runlength"}\n', "env_class of prompt .* cannot be used"),
    ],
)
async def test_a_stream_that_begins_broken_does_not_start(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    reader = Reader(stream([path]))
    with pytest.raises(DataError, match=message):
        await reader.start()
    await reader.loader.source.aclose()


def test_a_missing_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        stream([tmp_path / "absent.jsonl"])


async def test_characters_that_the_tokenizer_lacks_are_found_as_they_are_read(tmp_path: Path) -> None:
    (path, *_) = write_all_kinds(tmp_path, [*rows_of(3), {"prompt": "5?"}])
    settings = [f"data.train_data=[{path}]", "data.streaming=true", "trainer.max_steps=1"]
    prompts = load_inputs(compose("quickstart", [*settings, "environment.env_class=single_turn"])).dataset
    assert isinstance(prompts, StreamingPrompts)
    reader = Reader(prompts)
    with pytest.raises(ConfigError, match=r"contain '\?', which .*alphabet"):
        await reader.read()
    await reader.loader.source.aclose()


async def test_duplicate_ids_are_two_prompts_with_a_group_index_each(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a", "uid": "x"}\n{"prompt": "b", "uid": "x"}\n')
    records = await Reader(stream([path])).read()
    assert [(record.uid, record.prompt[0]["content"]) for record in records] == [("x", "a"), ("x", "b")]


def rewritten(rows: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    return {
        "the same": rows,
        "shorter": rows[:-1],
        "longer": [*rows, {"prompt": "1=", "answer": "1"}],
        "changed": [{**rows[0], "answer": "9"}, *rows[1:]],
    }[how]


async def test_prompts_that_are_too_long_are_left_out_also_after_a_resume(tmp_path: Path) -> None:
    rows = [{**row, "prompt": row["prompt"] * (20 if number % 3 == 0 else 1)} for number, row in enumerate(rows_of(40))]
    (path, *_) = write_all_kinds(tmp_path, rows)

    def reader(action: str) -> Reader:
        prompts = stream([path])
        prompts.fit = PromptLimit(compose("quickstart", [f"data.on_long_prompt={action}"]), download=False).fit
        return Reader(prompts)

    first = reader("filter")
    seen = [record.prompt[0]["content"] for record in await first.read(10)]
    state = json.loads(json.dumps(first.loader.state_dict()))
    await first.loader.source.aclose()
    resumed = reader("filter")
    resumed.loader.load_state_dict(state, [])
    seen += [record.prompt[0]["content"] for record in await resumed.read()]
    assert seen == [row["prompt"] for number, row in enumerate(rows) if number % 3]
    await resumed.loader.source.aclose()
    refused = reader("error")
    with pytest.raises(DataError, match=r"has 40 tokens, more than generator\.max_input_length=16"):
        await refused.start()
    await refused.loader.source.aclose()


async def test_a_stream_of_nothing_but_prompts_that_are_too_long_does_not_start(tmp_path: Path) -> None:
    (path, *_) = write_all_kinds(tmp_path, [{**row, "prompt": row["prompt"] * 20} for row in rows_of(3)])
    prompts = stream([path], epochs=2)
    prompts.fit = PromptLimit(compose("quickstart", ["data.on_long_prompt=filter"]), download=False).fit
    reader = Reader(prompts)
    with pytest.raises(
        DataError, match=r"All prompts of data\.train_data are too long .* data\.on_long_prompt=truncate"
    ):
        await reader.start()
    await reader.loader.source.aclose()


async def test_columns_that_a_reward_function_requires_are_missed_as_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "of_trl.py").write_text("def reward(completions, answer): return [1.0] * len(completions)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows_of(2), {"prompt": "2="}]))
    settings = [f"data.train_data=[{tmp_path}/rows.jsonl]", "data.streaming=true", "trainer.max_steps=1"]
    settings += ["environment.env_class=single_turn", f"rollout.stages.reward.function={tmp_path}/of_trl.py:reward"]
    prompts = load_inputs(compose("quickstart", settings)).dataset
    assert isinstance(prompts, StreamingPrompts)
    reader = Reader(prompts)
    with pytest.raises(ConfigError, match=r"names 'answer', and prompt '2-.* has no such column"):
        await reader.read()
    await reader.loader.source.aclose()


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("how", ["the same", "shorter", "longer", "changed"])
async def test_after_a_resume_files_may_be_elsewhere_but_not_others(tmp_path: Path, kind: int, how: str) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    reader = Reader(stream([write_all_kinds(tmp_path / "before", rows_of(40))[kind]]))
    await reader.read(10)
    state = reader.loader.state_dict()
    await reader.loader.source.aclose()
    resumed = Reader(stream([write_all_kinds(tmp_path / "after", rewritten(rows_of(40), how))[kind]]))
    if how != "the same":
        with pytest.raises(CheckpointError, match="fingerprint"):
            resumed.loader.load_state_dict(state, [])
        return
    resumed.loader.load_state_dict(state, [])
    assert [record.prompt[0]["content"] for record in await resumed.read(3)] == ["10=", "11=", "12="]
    await resumed.loader.source.aclose()


async def until_broken(prompts: StreamingPrompts, issued: int) -> dict[str, Any]:
    """A checkpoint of a run that has begun ``issued`` prompts, trained all but the last of them, and met a broken row."""
    reader = Reader(prompts)
    await reader.read(issued - 1)
    assert await reader.issue() == issued - 1
    await reader.changed.wait_until(lambda: "broken" in reader.loader.state_dict()["source"])
    state = json.loads(json.dumps(reader.loader.state_dict()))
    await reader.loader.source.aclose()
    return dict(state)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("how", ["mended", "left out", "mended, as are rows behind it", "not mended"])
async def test_a_broken_row_can_be_mended(tmp_path: Path, kind: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 4)
    rows, broken, issued = rows_of(24), 18, 13
    good = {"mended": rows, "left out": rows[:broken] + rows[broken + 1 :], "mended, as are rows behind it": rows[:-3]}
    rows = [*rows[:broken], {"prompt": None, "answer": ""}, *rows[broken + 1 :]]
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    state = await until_broken(stream([write_all_kinds(tmp_path / "before", rows)[kind]]), issued)
    resumed = Reader(stream([write_all_kinds(tmp_path / "after", good.get(how, rows))[kind]]))
    resumed.loader.load_state_dict(state, [])
    texts = [record.prompt[0]["content"] for record in await resumed.read(1 + broken - issued)]
    assert texts == [f"{row}=" for row in range(issued - 1, broken)]
    if how == "not mended":
        with pytest.raises(DataError, match="lacks the key 'prompt'") as caught:
            await resumed.issue()
        assert "keep all rows before it as they are" in caught.value.__notes__[0]
    else:
        assert "broken" not in resumed.loader.state_dict()["source"], "from now on it is as any other run"
        rest = [row["prompt"] for row in good[how][broken:]]
        assert [record.prompt[0]["content"] for record in await resumed.read()] == rest
    await resumed.loader.source.aclose()


@pytest.mark.parametrize("how", ["changed", "left out", "all behind it left out"])
async def test_rows_that_were_begun_before_a_broken_one_was_met_stay_as_they_are(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 4)
    rows, path = rows_of(20), tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    state = await until_broken(stream([path]), 10)
    now = {"changed": [*rows[:9], {"prompt": "1=", "answer": "9"}, *rows[10:]], "left out": rows[1:]}
    path.write_text("".join(json.dumps(row) + "\n" for row in now.get(how, rows[:9])))
    resumed = Reader(stream([path]))
    resumed.loader.load_state_dict(state, [])
    error = DataError if how == "all behind it left out" else CheckpointError
    with pytest.raises(error, match=r"ends after 9 prompts|changed within its first 10 rows"):
        await resumed.start()
    await resumed.loader.source.aclose()


class Counted(StreamingPrompts):
    """What the plan is told of a stream, here."""

    def __len__(self) -> int:
        return 11


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_run_ends_with_its_stream_and_resumes_within_it(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "eleven.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(11)))
    monkeypatch.setattr(
        harness, "load_dataset", lambda *_: Counted([path], RecordMaker("prompt", "run_length"), epochs=2)
    )
    overrides = [f"trainer.mode={mode}", f"data.train_data=[{path}]", "trainer.max_steps=30"]
    stopped = Harness(tmp_path / "run", *overrides)
    stopped.backend.before_update = lambda _: (
        stopped.trainer.request_stop() if stopped.trainer.global_step == 1 else None
    )
    await stopped.train()
    assert len(stopped.trained) == 8 and not stopped.trainer.finished
    resumed = Harness(tmp_path / "run", *overrides)
    await resumed.train()
    assert resumed.trainer.finished
    assert len(resumed.trained) == len(set(resumed.trained)) == 20, "five steps of four; two prompts fill no minibatch"
    assert set(resumed.trained) < set(range(22))
    uids = {call.partition("@")[0] for call in stopped.generator.calls + resumed.generator.calls}
    assert len(uids) == 11


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_run_that_meets_a_broken_row_stops_with_a_checkpoint_and_continues_when_it_is_fixed(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(10)) + "{")
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 2)
    monkeypatch.setattr(streaming, "ROWS_AHEAD", 2)
    monkeypatch.setattr(
        harness, "load_dataset", lambda *_: Counted([path], RecordMaker("prompt", "run_length"), epochs=1)
    )
    run = Harness(tmp_path / "run", f"trainer.mode={mode}", f"data.train_data=[{path}]", "trainer.max_steps=30")
    with pytest.raises(DataError, match=r"broken\.jsonl:11 is not JSON"):
        await run.train()
    latest = run.trainer.components.checkpoints.latest()
    assert latest is not None
    assert json.loads((latest / "rollout_state.json").read_text())["global_step"] == len(run.trained) // 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(16)))
    again = Harness(tmp_path / "run", f"trainer.mode={mode}", f"data.train_data=[{path}]", "trainer.max_steps=30")
    await again.train()
    assert sorted(again.trained) == list(range(16)), "mended, it goes on, and no prompt is lost"


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_admission_does_not_wait_for_rows_when_the_reader_is_gone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = stream(write_all_kinds(tmp_path, rows_of(3 * CHUNK_ROWS))[:1])
    reader = Reader(prompts)
    await reader.start()
    assert prompts._reading is not None
    if how == "cancelled":
        prompts._reading.cancel()
    else:
        monkeypatch.setattr(prompts._rows, "state_dict", lambda: 1 / 0)
    with pytest.raises(DataError if how == "cancelled" else ZeroDivisionError):
        await reader.read()
    await reader.loader.source.aclose()


@pytest.mark.parametrize("frontier", range(7))
async def test_a_checkpoint_reads_again_from_the_frontier_on_wherever_it_is(
    tmp_path: Path, frontier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 3)
    paths = write_all_kinds(tmp_path, rows_of(12))[:1]
    reader = Reader(stream(paths))
    await reader.start()
    issued = [await reader.issue() for _ in range(8)]
    settled = [group_index for group_index in issued if group_index != frontier]
    reader.loader.settle([group_index for group_index in settled if group_index is not None], "trained")
    resumed = Reader(stream(paths))
    resumed.loader.load_state_dict(json.loads(json.dumps(reader.loader.state_dict())), [])
    await resumed.start()
    assert [await resumed.issue(), await resumed.issue()] == [frontier, 8]
    texts = [resumed.loader.source.record(group_index).prompt[0]["content"] for group_index in (frontier, 8)]
    assert texts == [f"{frontier}=", "8="]
    for loader in (reader.loader, resumed.loader):
        await loader.source.aclose()
