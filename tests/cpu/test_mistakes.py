"""Typical mistakes: each ends the command before training, and its message has the place and the remedy."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

import skyrl_train
from skyrl_train import errors
from skyrl_train.build import checks
from skyrl_train.build.checks import check_engine_devices, check_machine
from skyrl_train.config.compose import compose
from skyrl_train.config.keys import in_free_section, known_keys, meant_setting
from skyrl_train.config.synonyms import SYNONYMS
from skyrl_train.endpoint.server.gateway import Gateway
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.entrypoints.command_line import main
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.episode import Episode
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError, DataError, GeneratorOutputError, ModelError
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.models.folder import load_config
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.rollout.data.dataset import PromptDataset, check_template, open_rows

CODE = """
from skyrl_train import Environment, register_environment

@register_environment("sums of a file")
class Sums(Environment):
    is_blocking = False
    answer = {"observations": [], "reward": 1.0, "done": True}

    def step(self, action):
        return self.answer

class Number(Sums):
    answer = 1.0

class Text(Sums):
    answer = {"reward": "1.0", "done": True}

class Unended(Sums):
    answer = {"reward": 1.0}

class TakesNothing(Sums):
    def __init__(self): pass

class TakesMore(Sums):
    def step(self, action, number): return self.answer

class Awaits(Sums):
    async def step(self, action): return self.answer

async def agent(question, base_url): return 1.0

class Talks(Sums):
    answer = {"reward": 0.0, "done": False, "observations": "go on"}

def of_trl(completions, answer, **kwargs): return [1.0] * len(completions)
def of_trl_without_columns(completions, **kwargs): return [1.0] * len(completions)
def of_trl_with_solution(completions, solution): return [1.0] * len(completions)
def of_trl_with_prompt(prompt, completions): return [1.0] * len(completions)
def of_trl_with_answer(completions, answer): return [1.0] * len(completions)
def one_sample(sample, answer): return 1.0
def reward(group, scale=1.0, prompts=None): return [scale] * len(group.samples)
class OfTRL:
    def __call__(self, completions, **kwargs): return [1.0] * len(completions)
class Scale:
    def __init__(self, scale): self.scale = scale
    def __call__(self, group): return [self.scale] * len(group.samples)
"""
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
ENVIRONMENT = "environment.env_class=mine.py:Sums"
ALPHABET = "trainer.policy.model.build.alphabet='0123456789+='"
OWN = ("data.train_data=[own.jsonl]", ALPHABET)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and code of a user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    files = {
        "own": ROWS,
        "questions": [{"question": row["prompt"], "answer": row["answer"]} for row in ROWS],
        "long": [ROWS[0], {**ROWS[1], "prompt": "1" * 40 + "+1="}, *ROWS[2:]],
        "alllong": [{**row, "prompt": "1" * 40} for row in ROWS],
        "empty": [ROWS[0], {**ROWS[1], "prompt": ""}],
        "third": [*ROWS[:2], {"prompt": "3+1="}],
        "named": [{**row, "env_class": "sums of a file"} for row in ROWS],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.csv").write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in ROWS))
    return tmp_path


def reward(name: str, *more: str) -> tuple[str, ...]:
    return (*OWN, "environment.env_class=single_turn", f"rollout.stages.reward.function=mine.py:{name}", *more)


def long(*more: str) -> tuple[str, ...]:
    return ("data.train_data=[long.jsonl]", ALPHABET, ENVIRONMENT, "generator.max_input_length=32", *more)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trainer.learning_rate=1e-5"], ["Did you mean trainer.policy.optimizer_config.lr?"]),
        (["--trainer.seed=3"], ["without dashes: trainer.seed=3"]),
        (["--trainer.seed", "3"], ["without dashes: trainer.seed=3"]),
        (["--learning_rate", "1e-5"], ["without dashes: trainer.policy.optimizer_config.lr=1e-5"]),
        (["--multirun", "trainer.seed=1,2"], ["skyrl-train sweep RECIPE key=a,b"]),
        (["trainer.seed=1,2"], ["for several runs, use skyrl-train sweep"]),
        (["trainer.seed", "=", "3"], ["without spaces: trainer.seed=3"]),
        (["trainer.seed=", "3"], ["without spaces: trainer.seed=3"]),
        (["trainer.seed = 3"], ["without spaces: trainer.seed=3"]),
        (["trainer.trackers=[wandbb]"], ["Did you mean wandb?", "package.module:Name"]),
        (["generator.inference_engine.backend=sglang"], ["Known: embedded, vllm, vllm_remote", "file.py:Name"]),
        (
            ["trainer.policy.model.build.alphabet=01+="],
            ["\"trainer.policy.model.build.alphabet='01+='\"", "extraneous input '='"],
        ),
        ([OWN[0], ENVIRONMENT], ["\"trainer.policy.model.build.alphabet='+0123456789=abcdef'\""]),
        (["data.train_data=[owm.jsonl]"], ["owm.jsonl does not exist", "Did you mean own.jsonl?"]),
        (["data.train_data=[data/gsm8k/train.parquet]"], ["does not exist", "prepare_data.py"]),
        (["data.train_data=[questions.jsonl]", ENVIRONMENT], ["questions.jsonl:1", "Set data.prompt_key=question"]),
        (OWN, ["environment.env_class=run_length, the default, is a toy task", "skyrl-train init NAME --data FILE"]),
        ([*reward("reward"), "environment.env_class=run_length"], ["Set environment.env_class=single_turn"]),
        ([*OWN, "environment.env_class=gsm8k"], ["is skyrl_gym:gsm8k", "reward_spec", "the row has ['answer']"]),
        (reward("of_trl_with_solution"), ["names 'solution'", "columns of its row: answer"]),
        (reward("of_trl_with_prompt"), ["names 'prompt'", "Did you mean prompts?"]),
        (reward("of_trl", "data.train_data=[third.jsonl]"), ["prompt '2-", "columns of its row: none"]),
        (
            reward("of_trl", "trainer.eval.interval=1", "trainer.eval.eval_data=[third.jsonl]"),
            ["prompt '2-", "columns of its row: none"],
        ),
        (reward("of_trl_with_answer", "rollout.stages.reward.kwargs.size=2"), ["keyword argument 'size'"]),
        (reward("one_sample"), ["takes (sample, answer)", "one number for each of group.samples"]),
        (
            reward("reward", "rollout.stages.reward.kwargs.size=2"),
            ["takes (group, scale=1.0, prompts=None)", "argument 'size'"],
        ),
        (long(), ["1 of 4 prompts", "has 43 tokens", "generator.max_input_length=43", "data.on_long_prompt=filter"]),
        (
            long("data.train_data=[alllong.jsonl]", "data.on_long_prompt=filter"),
            ["4 of 4 prompts", "generator.max_input_length=40, or set data.on_long_prompt=truncate to cut"],
        ),
        (long("data.train_data=[empty.jsonl]"), ["Prompt '1-", "is empty", "Remove the row"]),
        (
            ["generator.name=harness", "generator.kwargs.agent=mine.py:reward", "generator.kwargs.endpoint.port=free"],
            ["generator.kwargs.endpoint.port=free", "integer"],
        ),
        (
            [*OWN, "environment.env_class=mine.py:TakesNothing"],
            ["unexpected keyword argument 'extras'", "def __init__(self, extras)"],
        ),
        ([*OWN, "environment.env_class=mine.py:TakesMore"], ["argument: 'number'", "def step(self, action)"]),
        ([*OWN, "environment.env_class=mine.py:Awaits"], ["step() must not be async", "it may block"]),
        (["generator.name=harness"], ["The harness needs one agent", "generator.kwargs.command"]),
        (
            ["generator.name=harness", "generator.kwargs.agent=mine.py:agent"],
            ["asks for 'question'", "may name prompt"],
        ),
        (["data.on_long_prompt=skip"], ["data.on_long_prompt=skip is unknown", "error, filter, truncate, keep"]),
        (
            [*OWN, ENVIRONMENT, "environment.modules=[absent.py]"],
            ["environment.modules='absent.py'", "path/to/file.py"],
        ),
    ],
)
def test_a_mistake_is_told_with_its_remedy(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = main(["plan", "quickstart", *arguments]), capsys.readouterr()
    assert code == 2, output.err
    assert [part for part in told if part not in output.err] == []
    assert re.fullmatch(r"More: docs/tutorials/errors\.md#(config|data|model)error", output.err.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["data.train_data=[own.csv]", ALPHABET, ENVIRONMENT], "4, own.csv"),
        (["data.train_data=[named.jsonl]", ALPHABET, "environment.modules=[mine.py]"], "4, named.jsonl"),
        (reward("reward", "rollout.stages.reward.kwargs.scale=2"), "4, own.jsonl"),
        (reward("of_trl"), "4, own.jsonl"),
        (reward("of_trl_without_columns"), "4, own.jsonl"),
        (reward("OfTRL"), "4, own.jsonl"),
        (reward("Scale", "rollout.stages.reward.kwargs.scale=2"), "4, own.jsonl"),
        (long("data.on_long_prompt=filter"), "1 of 4 prompts are too long"),
        (long("data.on_long_prompt=filter"), "3, long.jsonl"),
        (long("data.on_long_prompt=truncate"), "they were cut to 32"),
        (
            long("data.on_long_prompt=filter", "trainer.eval.interval=1", "trainer.eval.eval_data=[long.jsonl]"),
            "1 of 4 prompts of the evaluation are too long",
        ),
        (long("data.on_long_prompt=truncate"), "4, long.jsonl"),
        (long("data.on_long_prompt=keep"), "4, long.jsonl"),
    ],
)
def test_correct_settings_are_planned(arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", *arguments]) == 0, capsys.readouterr().err
    assert shown in capsys.readouterr().out


def test_a_missing_file_is_not_taken_for_any_other_with_its_suffix() -> None:
    with pytest.raises(DataError) as raised:
        open_rows("absent.jsonl")
    assert "does not exist" in str(raised.value) and "Did you mean" not in str(raised.value)
    with pytest.raises(DataError, match=r"Did you mean questions\.jsonl"):
        open_rows("question.json")


def test_an_agent_that_asks_for_another_model_learns_how_to_name_it() -> None:
    served = SimpleNamespace(settings=ServerSettings(), client=SimpleNamespace(adapters={}), model_names=["policy"])
    with pytest.raises(
        DialectError, match=r"'gpt-4o' is not served.*Served: policy.*generator\.kwargs\.endpoint\.model_names"
    ):
        Gateway.adapter(served, "gpt-4o")


def test_a_recipe_for_data_of_any_form_finds_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["init", "mine", "--data", "own.csv"]) == 0
    rows = open_rows("own.csv")
    monkeypatch.setattr("skyrl_train.rollout.data.dataset.open_rows", lambda name: rows)
    assert main(["init", "hub", "--data", "openai/sums:main:train"]) == 0
    listed = [compose(f"{name}/recipe.yaml").data.train_data for name in ("mine", "hub")]
    assert listed == [["../own.csv"], ["openai/sums:main:train"]]


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_name_of_another_library_leads_to_a_setting(name: str) -> None:
    setting = SYNONYMS[name]
    assert setting in known_keys() or in_free_section(setting)
    assert meant_setting(f"trainer.{name}") in (setting, f"trainer.{setting.rpartition('.')[2]}")


def test_a_name_of_another_library_is_looked_for_in_its_own_section_first() -> None:
    assert meant_setting("trainer.critic.optimizer_config.learning_rate") == "trainer.critic.optimizer_config.lr"


def test_a_model_that_is_nowhere_is_refused_after_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def repo_info(self: Any, name: str, **arguments: Any) -> None:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)
    with pytest.raises(ModelError, match=r"'models/qwen' is no folder here.*no network.*hf download models/qwen"):
        load_config("models/qwen")
    with pytest.raises(DataError, match=r"openai/nothing is no file or folder here.*no network.*to_parquet"):
        next(open_rows("openai/nothing").rows())
    assert asked == ["models/qwen", "openai/nothing"]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    (folder / "cache" / "openai___noThing").mkdir(parents=True)
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: Dataset.from_list(ROWS))
    assert [row.value for row in open_rows("openai/Nothing:train").rows()] == ROWS
    assert len(asked) == 2, "what the cache has needs no request"


@pytest.mark.parametrize("name", ["Number", "Text", "Unended", "Talks"])
async def test_a_step_that_is_none_stops_the_run_and_names_its_line(name: str) -> None:
    factory = resolve_environment(compose("base", [f"environment.env_class=mine.py:{name}"]).environment)
    with pytest.raises(
        GeneratorOutputError, match=rf"step\(\) of environment 'mine.py:{name}' \(.*mine\.py:9\) returned"
    ):
        async with Episode(factory, {}, "p") as episode:
            await episode.step("a", "stop")


def test_conversations_need_a_chat_template() -> None:
    tokenizer = character_tokenizer("abc")
    conversation = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    plain, several = (PromptDataset((PromptRecord("p", prompt),)) for prompt in (conversation[1:], conversation))
    check_template(several, tokenizer)
    tokenizer.chat_template = None
    check_template(plain, tokenizer)
    with pytest.raises(ConfigError, match=r"\['system', 'user'\].*generator\.chat_template"):
        check_template(several, tokenizer)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


ENGINE = "generator.inference_engine"


def test_a_missing_device_package_or_port_is_told_before_models_are_loaded(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = ["generator.name=harness", "generator.kwargs.agent=mine.py:reward"]
    for generator in (harness, ["generator.name=skyrl"]):
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port}.*generator\.kwargs\.endpoint\.port; 0 takes a free one"
        ):
            check_machine(compose("base", [*generator, f"generator.kwargs.endpoint.port={port}"]))
    check_machine(compose("base", [*harness, "generator.kwargs.endpoint.port=0"]))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for key in ("trainer.device", "generator.inference_engine.device"):
        with pytest.raises(ConfigError, match=rf"{key}: device 'cuda' is not there: torch sees 0 GPUs.*doctor"):
            check_machine(compose("base", [f"{key}=cuda"]))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    for overrides, visible, told in (
        ([], 0, r"inference_engine\.device=cuda with backend=vllm: torch sees 0 GPUs\. Set .*device=cpu.*doctor"),
        (["num_engines=2", "tensor_parallel_size=2"], 3, r"engines would compute on GPU 0, 1, 2, 3, and torch sees 3"),
        (["devices=[5]"], 4, r"engines would compute on GPU 5, and torch sees 4, numbered from 0"),
        (["devices=[0,0]", "num_engines=2"], 1, None),
        (["num_engines=2"], 2, None),
        (["executor=ray"], 0, None),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda visible=visible: visible)
        engine = compose(
            "base", [f"{ENGINE}.{override}" for override in ("backend=vllm", "device=cuda", *overrides)]
        ).generator.inference_engine
        with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
            check_engine_devices(engine, engine.num_engines)
    evaluated = [
        f"{ENGINE}.backend=vllm",
        f"{ENGINE}.device=cuda",
        "trainer.eval.interval=5",
        "trainer.eval.num_engines=1",
    ]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 engines would compute on GPU 0, 1, and torch sees 1"):
        check_machine(compose("base", evaluated))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed.*pip install 'skyrl-async\[vllm\]'.*--extra vllm"):
        check_machine(compose("base", ["generator.inference_engine.backend=vllm"]))


def test_each_family_of_errors_has_a_section_and_its_subclasses_name_it() -> None:
    root = Path(skyrl_train.__file__).parent
    families = {
        name for file in root.rglob("*.py") for name in re.findall(r"^class (\w+)\(SkyRLError", file.read_text(), re.M)
    }
    pages = {name: (root.parent / f"docs/tutorials/{name}.md").read_text() for name in ("errors", "troubleshooting")}
    assert sorted(re.findall(r"^### (\w+)$", pages["errors"], re.M)) == sorted(families)
    for kind in (kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not errors.SkyRLError):
        page, _, section = kind.__new__(kind).docs.partition("#")
        assert (page, section in {name.lower() for name in families}) == ("docs/tutorials/errors.md", True)
        assert kind.__name__ in pages["errors"]
    assert errors.NonFiniteRewardError("").docs.endswith("#rollouterror")
    assert errors.SkyRLError("").docs == "docs/tutorials/errors.md", "without a section of its own"
    linked = re.findall(r"\(errors\.md#(\w+)\)", pages["troubleshooting"])
    assert {"configerror", "dataerror", "modelerror", "rollouterror"} <= set(linked) <= {n.lower() for n in families}
