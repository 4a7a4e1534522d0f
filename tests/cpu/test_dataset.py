"""Data sets: three kinds of files, generated prompts, and what a broken file says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from skyrl_train.config.compose import compose
from skyrl_train.config.schema import DataConfig, EnvironmentConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.data.dataset import PromptDataset, check_alphabet, load_dataset, open_rows

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 1?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "3"},
        "extra_info": {"index": 1},
    },
]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(*paths: str | Path, **data: Any) -> PromptDataset:
    return load_dataset(DataConfig(train_data=[str(path) for path in paths], **data), EnvironmentConfig())


def test_the_three_kinds_of_files_give_the_same_records(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "train.jsonl", ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "v:2" / "train"))
    records = load(jsonl).records
    assert load(tmp_path / "train.parquet").records == records
    assert load(tmp_path / "v:2" / "train").records == records
    assert records[1].prompt == ROWS[1]["prompt"]
    assert records[1].env_class == "gsm8k"
    assert records[1].data_source == "openai/gsm8k"
    assert records[1].env_extras == {key: ROWS[1][key] for key in ("data_source", "reward_spec", "extra_info")}


def test_a_folder_like_one_of_the_hub_has_configurations_and_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    files = {"main": ["train", "test"], "socratic": ["train"]}
    listed = "".join(
        f"- config_name: {name}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {name}/{split}.jsonl\n" for split in splits)
        for name, splits in files.items()
    )
    for name, splits in files.items():
        (tmp_path / "openai" / "gsm8k" / name).mkdir(parents=True)
        for split in splits:
            write_jsonl(tmp_path / "openai" / "gsm8k" / name / f"{split}.jsonl", [{"prompt": f"{name} {split}"}])
    (tmp_path / "openai" / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    for chosen in ("main:train", "main:test", "socratic:train"):
        (record,) = load(f"openai/gsm8k:{chosen}")
        assert record.prompt[0]["content"] == chosen.replace(":", " ")
    for wrong, message in (("", "socratic"), (":train", "main"), (":main:dev", "dev"), (":a:b:c", "does not exist")):
        with pytest.raises(DataError, match=message):
            load(f"openai/gsm8k{wrong}")


def test_a_plain_string_is_one_user_message_and_the_file_names_the_source(tmp_path: Path) -> None:
    (record,) = load(write_jsonl(tmp_path / "sums.jsonl", [{"question": "1 + 1?"}]), prompt_key="question")
    assert record.prompt == [{"role": "user", "content": "1 + 1?"}]
    assert (record.env_class, record.data_source, record.env_extras) == (None, "sums", {})


def test_uids_are_the_given_ones_or_stable_and_unique(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "uid": "first"}, {"prompt": "b"}, {"prompt": "b"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    uids = [record.uid for record in load(path)]
    assert uids[0] == "first"
    assert len(set(uids)) == 3
    assert uids == [record.uid for record in load(path)]
    both = load(
        write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b"}]), write_jsonl(tmp_path / "c.jsonl", [{"prompt": "b"}])
    )
    assert len({record.uid for record in both}) == 2


def test_the_fingerprint_is_that_of_the_content_in_its_order(tmp_path: Path) -> None:
    def fingerprint(rows: list[Any]) -> str:
        return load(write_jsonl(tmp_path / "train.jsonl", rows)).fingerprint

    original = fingerprint(ROWS)
    assert fingerprint(ROWS) == original
    assert fingerprint([dict(reversed(row.items())) for row in ROWS]) == original, "key order is not content"
    assert fingerprint(ROWS[::-1]) != original
    changed = [ROWS[0], {**ROWS[1], "reward_spec": {"method": "rule", "ground_truth": "4"}}]
    assert fingerprint(changed) != original


def test_without_files_the_environment_makes_the_prompts() -> None:
    dataset = load_dataset(DataConfig(generate=12, seed=5), EnvironmentConfig(kwargs={"max_count": 4}))
    assert len(dataset) == 12
    assert all(len(record.env_extras["answer"]) <= 4 for record in dataset)
    assert dataset[2:4] == dataset.records[2:4]
    again = load_dataset(DataConfig(generate=12, seed=5), EnvironmentConfig(kwargs={"max_count": 4}))
    assert again.fingerprint == dataset.fingerprint
    other = load_dataset(DataConfig(generate=12, seed=6), EnvironmentConfig(kwargs={"max_count": 4}))
    assert other.fingerprint != dataset.fingerprint


def test_a_fingerprint_of_odd_values_does_not_depend_on_the_process() -> None:
    extras = {"set": {"b", "a"}, "bytes": b"\x01", "object": object()}
    one, two = (PromptDataset((PromptRecord("u", [], None, {**extras, "object": object()}),)) for _ in range(2))
    assert one.fingerprint == two.fingerprint


def test_prompts_that_the_alphabet_cannot_spell_are_refused(tmp_path: Path) -> None:
    dataset = load_dataset(DataConfig(generate=50), EnvironmentConfig())
    check_alphabet(dataset, "0123456789=abcdef")
    with pytest.raises(ConfigError, match=r"contain '=f', which .* at least '0123456789=abcdef'"):
        check_alphabet(dataset, "0123456789abcde")
    digits = load_dataset(DataConfig(generate=50), EnvironmentConfig(env_class="copy_digits"))
    check_alphabet(digits, "0123456789", words=[">"])
    with pytest.raises(ConfigError, match="contain '>', which"):
        check_alphabet(digits, "0123456789", words=[">>"])
    called = {"role": "assistant", "content": None, "tool_calls": []}
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}, called]}))
    check_alphabet(load_dataset(DataConfig(train_data=[str(file)]), EnvironmentConfig()), "1")


def test_the_alphabet_that_a_message_names_is_read_from_a_shell_as_it_is(tmp_path: Path) -> None:
    text = 'It\'s "5$" {a}\\b!`\n'
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": text}))
    data = DataConfig(train_data=[str(tmp_path / "data.jsonl")])
    with pytest.raises(ConfigError) as told:
        check_alphabet(load_dataset(data, EnvironmentConfig()), "x")
    (setting,) = shlex.split(str(told.value).rpartition(": ")[2].removesuffix("."))
    assert set(compose("quickstart", [setting]).trainer.policy.model.build.alphabet) == {*text, "x"}


@pytest.mark.parametrize("generate", [0, -3])
def test_no_prompts_at_all_are_refused(generate: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.generate"):
        load_dataset(DataConfig(generate=generate), EnvironmentConfig())


def test_an_unknown_environment_is_refused_before_any_file_is_read() -> None:
    with pytest.raises(ConfigError, match="Did you mean run_length"):
        load_dataset(DataConfig(train_data=["absent.jsonl"]), EnvironmentConfig(env_class="runlength"))


def test_an_environment_that_makes_no_prompts_needs_files() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_data"):
        load_dataset(DataConfig(), EnvironmentConfig(env_class="skyrl_gym:gsm8k"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "has no rows"),
        ("blank.jsonl", b"\n  \n", "has no rows"),
        (
            "broken.jsonl",
            b'{"prompt": "a"}\n\n{"prompt": \n',
            r"broken\.jsonl:3 is not JSON: Expecting value, character 12\. ",
        ),
        ("latin.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe4"}\n', r"latin\.jsonl:2 is not JSON"),
        (
            "digits.jsonl",
            b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}\n",
            r"digits\.jsonl:1 is not JSON: .*digits",
        ),
        ("list.jsonl", b"[1]\n", r"list\.jsonl:1 is a list"),
        (
            "key.jsonl",
            b'{"question": "a"}\n',
            r"key\.jsonl:1 lacks the key 'prompt'; it has \['question'\]\. Set data\.prompt_key=question",
        ),
        ("null.jsonl", b'{"prompt": null}\n', r"null\.jsonl:1 lacks the key"),
        (
            "some.jsonl",
            b'{"prompt": "a"}\n{"question": "b"}\n',
            r"jsonl:2 lacks the key 'prompt'.* The rows before it have",
        ),
        ("kind.jsonl", b'{"prompt": 7}\n', "must be a string or a list of messages"),
        ("none.jsonl", b'{"prompt": []}\n', "must be a string or a list of messages"),
        ("message.jsonl", b'{"prompt": [{"role": "user"}]}\n', "needs 'role' and 'content'"),
        ("env.jsonl", b'{"prompt": "a", "env_class": 3}\n', "env_class must be a string"),
        ("name.jsonl", b'{"prompt": "a", "env_class": "gsm9k"}\n', "env_class of prompt '0-.*cannot be used"),
        ("twice.jsonl", b'{"prompt": "a", "uid": 1}\n{"prompt": "b", "uid": "1"}\n', "same uid '1'"),
        ("rows.txt", b"prompt\na\n", r"'\.txt' is not supported"),
        ("wide.csv", b"prompt,answer\na,1\nb,2,3\n", r"wide\.csv:3 has another number of fields"),
        ("narrow.csv", b"prompt,answer\na,1\n\nb\n", r"narrow\.csv:4 has another number of fields"),
        ("latin.csv", b"prompt\n\xe4\n", "not a readable .csv file in UTF-8"),
        ("bare", b"", "no suffix.' is not supported"),
        ("torn.parquet", b"PAR1", "not a readable parquet file"),
    ],
)
def test_the_error_of_a_bad_file_names_place_and_problem(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_a_missing_file_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="not a folder of datasets"):
        load(tmp_path)
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="several splits"):
        load(tmp_path / "splits")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "sums.py").write_text("")
    with pytest.raises(DataError, match=r"cannot read it: Dataset scripts are no longer supported, but found sums\.py"):
        load(tmp_path / "sums")
    with pytest.raises(DataError, match=r"s3://bucket/a\.jsonl is a URL.* download the file"):
        open_rows("s3://bucket/a.jsonl")


def test_a_csv_file_may_have_values_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text(f"prompt,answer\n{'a' * 200_000},1\n")
    (record,) = load(tmp_path / "long.csv").records
    assert len(record.prompt[0]["content"]) == 200_000
