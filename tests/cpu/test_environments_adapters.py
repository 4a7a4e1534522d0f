"""skyrl-gym's environments and reasoning-gym's tasks run unchanged, with the real packages."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.environments import reasoning_gym_adapter
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError, DataError

pytest.importorskip("skyrl_gym")
pytest.importorskip("reasoning_gym")

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Shouting(BaseTextEnv):
    """A user's BaseTextEnv as he has it for SkyRL."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.scale = env_config.scale
        self.word = (extras or {})["word"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = self.scale * (action == self.word.upper())
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def factory(env_class: str, **kwargs: Any) -> Any:
    return resolve_environment(EnvironmentConfig(env_class=env_class, kwargs=kwargs))


@pytest.mark.parametrize("env_class", ["skyrl_gym:gsm8k", "gsm8k"])
def test_gsm8k_by_its_prefixed_and_by_its_plain_name(env_class: str) -> None:
    made = factory(env_class)
    assert made.is_blocking
    assert made.generate_prompts(3, seed=0) is None
    extras = {"reward_spec": {"method": "rule", "ground_truth": "72"}}
    assert made.make(extras).step("so it is #### 72")["reward"] == 1.0
    assert made.make(extras).step("so it is #### 71")["reward"] == 0.0


def test_gsm8k_over_several_turns() -> None:
    extras = {"reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 3}}
    environment = factory("skyrl_gym:gsm8k_multi_turn").make(extras)
    prompt = [{"role": "user", "content": "How many?"}]
    assert environment.init(prompt)[0] == prompt
    first = environment.step("hm")
    assert (first["reward"], first["done"], first["observations"][0]["role"]) == (0, False, "user")
    assert environment.step("#### 72")["done"]
    assert environment.get_metrics() == {"steps": 2}


@dataclass
class Loudness:
    scale: float = 3.0
    words: list[str] = field(default_factory=lambda: ["ha"])


class Configured(Shouting):
    """Its settings have defaults."""

    def __init__(self, env_config: Loudness | DictConfig, extras: dict[str, Any]) -> None:
        super().__init__(env_config, {"word": env_config.words[0]})


def test_settings_that_a_run_leaves_out_are_the_environments_defaults_as_in_skyrl() -> None:
    assert factory(f"{__name__}:Configured").make({}).step("HA")["reward"] == 3.0
    assert factory(f"{__name__}:Configured", words=["ho"]).make({}).step("HO")["reward"] == 3.0
    row = {"reward_spec": {"ground_truth": {"target": ["x"]}}, "max_turns": 2}
    group = factory("skyrl_gym:search", search_url="http://search:8000/retrieve").make(row).tool_group
    assert (group.search_url, group.topk) == ("http://search:8000/retrieve", 3)


def test_a_text_env_of_a_users_own_module() -> None:
    made = factory(f"{__name__}:Shouting", scale=2.0)
    assert made.make({"word": "ha"}).step("HA")["reward"] == 2.0


@pytest.mark.parametrize(("task", "kwargs"), [("chain_sum", {"max_terms": 3}), ("letter_counting", {})])
def test_reasoning_gym_scores_its_own_answers(task: str, kwargs: dict[str, Any]) -> None:
    made = factory(f"reasoning_gym:{task}", **kwargs)
    records = made.generate_prompts(5, seed=7)
    assert records == made.generate_prompts(5, seed=7)
    of_next = {str(record.prompt) for record in made.generate_prompts(5, seed=8)}
    assert not of_next & {str(record.prompt) for record in records}, "an evaluation has other prompts than training"
    for record in records:
        entry = record.env_extras["entry"]
        assert record.prompt == [{"role": "user", "content": entry["question"]}]
        assert made.make(record.env_extras).step(f" {entry['answer']}\n")["reward"] == 1.0
        assert made.make(record.env_extras).step("no idea")["reward"] < 1.0


def test_an_answer_that_takes_for_ever_to_evaluate_is_worth_nothing_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(reasoning_gym_adapter, "SCORE_CPU_S", 1)
    made = factory("reasoning_gym:countdown")
    [record] = made.generate_prompts(1, seed=7)
    entry = record.env_extras["entry"]
    assert made.make(record.env_extras).step("9**9**9")["reward"] == 0.0
    assert "An answer of 7 characters could not be scored" in caplog.text
    assert made.make(record.env_extras).step(entry["metadata"]["expression"])["reward"] == 1.0


def test_an_answer_is_not_evaluated_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = factory("reasoning_gym:spiral_matrix")
    [record] = made.generate_prompts(1, seed=7)
    monkeypatch.setattr(sys, "evaluated_by", None, raising=False)
    made.make(record.env_extras).step("[__import__('sys').__setattr__('evaluated_by', 1)]")
    assert sys.evaluated_by is None


def test_reasoning_gym_parameters_reach_the_task() -> None:
    made = factory("reasoning_gym:chain_sum", min_terms=5, max_terms=5)
    assert {r.env_extras["entry"]["metadata"]["num_terms"] for r in made.generate_prompts(5, seed=0)} == {5}


def test_a_reasoning_gym_row_without_an_entry_is_refused() -> None:
    with pytest.raises(DataError, match="'entry'"):
        factory("reasoning_gym:chain_sum").make({"answer": "3"})


@pytest.mark.parametrize(
    ("env_class", "package"), [("skyrl_gym:gsm8k", "skyrl-gym"), ("reasoning_gym:chain_sum", "reasoning-gym")]
)
def test_without_the_package_the_message_has_the_command_that_installs_it(
    env_class: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{env_class}.* Install it: pip install {package} .*--extra envs"):
        factory(env_class)


def test_without_skyrl_gym_its_ids_are_known_to_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"env_class='gsm8k' is unknown.* pip install skyrl-gym .*--extra envs"):
        factory("gsm8k")


@pytest.mark.parametrize("task", ["list_functions", "pool_matrix"])  # draw from the generators of random and numpy
def test_prompts_are_a_function_of_the_seed_whatever_the_process_has_drawn(task: str) -> None:
    prompts = []
    for number in (1, 2):
        random.seed(number)
        np.random.seed(number)
        before = random.getstate(), np.random.get_state()[1].tolist()
        prompts.append(factory(f"reasoning_gym:{task}").generate_prompts(40, seed=7))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert prompts[0] == prompts[1]
    assert prompts[0] != factory(f"reasoning_gym:{task}").generate_prompts(40, seed=8)
