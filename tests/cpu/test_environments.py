"""The environments of this library, and how a name in the configuration finds one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment, registered_environments, resolve_environment
from skyrl_train.environments.toy_tasks import GuessNumber, RunLength, positional_match
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.models.tiny import character_tokenizer


class Echo(Environment):
    """Found by its import path."""

    def __init__(self, extras: dict[str, Any], *, bonus: float = 0.0) -> None:
        super().__init__(extras)
        self.bonus = bonus

    def step(self, action: str) -> EnvironmentStep:
        return {"observations": [], "reward": self.bonus, "done": True}


class LouderEcho(Echo):
    def __init__(self, extras: dict[str, Any], *, volume: float, **others: Any) -> None:
        self.mark = others.pop("mark")
        super().__init__(extras, **others)
        self.bonus *= volume


class Hinted(GuessNumber):
    def __init__(self, extras: dict[str, Any], **others: Any) -> None:
        super().__init__(extras, **others)


class NoEnvironment:
    def step(self, action: str) -> None: ...


def factory(env_class: str, **kwargs: Any) -> Any:
    return resolve_environment(EnvironmentConfig(env_class=env_class, kwargs=kwargs))


def play(environment: Any, action: str, stop_reason: str = "stop") -> EnvironmentStep:
    environment.observe_stop(stop_reason)
    return environment.step(action)


# --- the tasks ---


@pytest.mark.parametrize(
    ("env_class", "prompt", "solve"),
    [
        ("run_length", r"\d\d[a-f]=", lambda text: text[2] * int(text[:2])),
        ("copy_digits", r"\d{3}>", lambda text: text[:-1]),
        ("sort_digits", r"\d{2,5}\^", lambda text: "".join(sorted(text[:-1]))),
    ],
)
def test_a_right_answer_read_off_the_prompt_gets_the_full_reward(env_class: str, prompt: str, solve: Any) -> None:
    import re

    made = factory(env_class)
    for record in made.generate_prompts(50, seed=1):
        text = record.prompt[0]["content"]
        assert re.fullmatch(prompt, text)
        environment = made.make(record.env_extras)
        assert play(environment, solve(text)) == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
        assert environment.get_metrics() == {"exact": 1.0}


def test_an_answer_that_did_not_end_gets_half() -> None:
    environment = factory("run_length").make({"answer": "cccc"})
    assert play(environment, "cccc", stop_reason="length")["reward"] == 0.5
    assert environment.get_metrics() == {"exact": 0.0}


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_positional_match_is_the_share_of_the_longer_text(answer: str, target: str) -> None:
    longest = max(len(answer), len(target))
    right = [answer[i] == target[i] for i in range(longest) if i < len(answer) and i < len(target)]
    assert positional_match(answer, target) == (right.count(True) / longest if longest else 1.0)
    assert (positional_match(answer, target) == 1.0) == (answer == target)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="'answer'"):
        factory("run_length").make({"question": "?"})


def test_run_length_counts_have_the_mean_the_cap_and_the_letters_asked_for() -> None:
    records = factory("run_length", mean_count=3, max_count=9, letters="xy").generate_prompts(4000, seed=0)
    counts = [len(record.env_extras["answer"]) for record in records]
    assert {record.env_extras["answer"][0] for record in records} == {"x", "y"}
    assert (min(counts), max(counts)) == (1, 9)
    # ceil of an exponential is geometric with q = exp(-1/mean); capped at c its mean is (1 - q^c) / (1 - q).
    q = math.exp(-1 / 3)
    assert sum(counts) / len(counts) == pytest.approx((1 - q**9) / (1 - q), abs=0.15)


@pytest.mark.parametrize("env_class", ["run_length", "copy_digits", "sort_digits", "guess_number"])
def test_generated_prompts_are_a_function_of_the_seed_and_fit_the_alphabet(env_class: str) -> None:
    made = factory(env_class)
    assert made.generate_prompts(20, seed=3) == made.generate_prompts(20, seed=3)
    assert made.generate_prompts(20, seed=3) != made.generate_prompts(20, seed=4)
    assert made.generate_prompts(20, seed=3) == made.generate_prompts(40, seed=3)[:20]
    tokenizer = character_tokenizer(registered_environments()[env_class].alphabet)
    for record in made.generate_prompts(200, seed=0):
        text = record.prompt[0]["content"] + record.env_extras.get("answer", "")
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("env_class", "kwargs"),
    [
        ("run_length", {"mean_count": 0}),
        ("run_length", {"max_count": 100}),
        ("run_length", {"letters": ""}),
        ("copy_digits", {"min_digits": 4}),
        ("sort_digits", {"min_digits": 0}),
        ("guess_number", {"numbers": 1}),
    ],
)
def test_impossible_parameters_are_refused(env_class: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.kwargs"):
        factory(env_class, **kwargs).generate_prompts(1, seed=0)


# --- guess a number ---


@pytest.mark.parametrize("number", range(10))
def test_binary_search_finds_every_number_within_four_guesses(number: int) -> None:
    environment = GuessNumber({"number": number})
    low, high, rewards = 0, 9, []
    for _ in range(4):
        guess = (low + high) // 2
        step = environment.step(str(guess))
        rewards.append(step["reward"])
        if step["done"]:
            break
        if step["observations"] == [{"role": "user", "content": "+"}]:
            low = guess + 1
        else:
            assert step["observations"] == [{"role": "user", "content": "-"}]
            high = guess - 1
    assert step["done"]
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert environment.get_metrics() == {"hit": 1.0, "guesses": len(rewards)}


@pytest.mark.parametrize("action", ["", "+", "5?", "10", "٣", "-1", " 4"])
def test_a_text_that_is_no_number_in_the_range_uses_up_a_guess(action: str) -> None:
    environment = GuessNumber({"number": 4}, max_turns=2)
    step = environment.step(action)
    assert (step["observations"][0]["content"], step["reward"], step["done"]) == ("!", 0.0, False)
    assert environment.step(action)["done"]
    assert environment.get_metrics()["hit"] == 0.0


@pytest.mark.parametrize(("last", "reward"), [("4", 1.0), ("5", 4 / 9), ("9", 2 / 9), ("!", 0.0)])
def test_a_lost_game_is_worth_at_most_half_by_the_closeness_of_its_last_guess(last: str, reward: float) -> None:
    environment = GuessNumber({"number": 4}, max_turns=2)
    assert environment.step("3")["reward"] == 0.0, "only the end of the game is rewarded"
    step = environment.step(last)
    assert step["done"]
    assert step["reward"] == pytest.approx(reward)


@pytest.mark.parametrize("kwargs", [{"max_turns": 0}, {"numbers": 1}])
def test_a_game_that_cannot_be_played_is_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"environment.kwargs.{next(iter(kwargs))} must be at least"):
        GuessNumber({"number": 0}, **kwargs)


@pytest.mark.parametrize("number", [None, "4", 10, -1])
def test_a_row_without_a_number_in_the_range_is_refused(number: object) -> None:
    with pytest.raises(DataError, match="'number'"):
        GuessNumber({"number": number})


# --- names ---


def test_a_registered_name_finds_its_class() -> None:
    assert type(factory("run_length").make({"answer": "a"})) is RunLength
    assert factory("run_length").is_blocking is False


@pytest.mark.parametrize("separator", [":", "."])
def test_an_import_path_finds_its_class_and_passes_kwargs(separator: str) -> None:
    made = factory(f"{__name__}{separator}Echo", bonus=0.25)
    assert made.make({}).step("")["reward"] == 0.25
    assert made.is_blocking, "an environment blocks unless it promises not to"
    assert made.generate_prompts(3, seed=0) is None


def test_a_constructor_may_pass_keyword_arguments_on() -> None:
    made = factory(f"{__name__}:LouderEcho", bonus=0.25, volume=2.0, mark="x")
    assert made.make({}).step("")["reward"] == 0.5
    guess = factory(f"{__name__}:Hinted", numbers=30)
    assert max(record.env_extras["number"] for record in guess.generate_prompts(100, seed=0)) > 9
    assert guess.make({"number": 29}).step("29")["reward"] == 1.0


def test_a_kwarg_goes_wherever_it_is_a_parameter() -> None:
    made = factory("guess_number", numbers=30, max_turns=7)
    numbers = [record.env_extras["number"] for record in made.generate_prompts(100, seed=0)]
    assert max(numbers) > 9
    assert [made.make({"number": 29}).step("29")["reward"]] == [1.0]


@pytest.mark.parametrize(
    ("env_class", "kwargs", "message"),
    [
        ("run_lenght", {}, "Did you mean run_length"),
        ("no.such.module:Class", {}, "cannot be imported"),
        (f"{__name__}:Missing", {}, "cannot be imported"),
        (f"{__name__}:NoEnvironment", {}, "lacks init, close, get_metrics"),
        ("run_length", {"max_cuont": 3}, "Did you mean max_count"),
        ("skyrl_gym:gsm9k", {}, "Did you mean gsm8k"),
        ("reasoning_gym:chain_sums", {}, "Did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "Did you mean min_terms"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "rejects"),
    ],
)
def test_a_name_that_cannot_be_resolved_is_rejected_with_a_remedy(
    env_class: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        factory(env_class, **kwargs)


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ConfigError, match="Two environments are called 'run_length'"):
        register_environment("run_length")(Echo)
