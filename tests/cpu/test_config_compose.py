"""Composition: recipes and overrides become typed settings; each error names the nearest known setting."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from pathlib import Path

import composition
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.compare import (
    CHANGES_THE_REST,
    MAKES_ANOTHER_RUN,
    MAY_CHANGE,
    changes,
    differences,
    table_entry,
)
from skyrl_train.config.compose import compose, from_yaml, recipe_names, to_yaml
from skyrl_train.config.keys import known_keys, nearest, setting
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import FailurePolicy, RunConfig, TrainerMode
from skyrl_train.errors import ConfigError

MULTIPLIERS = "trainer.policy.optimizer_config.lr_multipliers"


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A user's own recipe folder, good and bad."""
    texts = {
        "mine": "defaults: [base, _self_]\ntrainer: {epochs: 3}\nenvironment: {kwargs: {a: 1}}\n",
        "on_ours": "defaults: [quickstart, _self_]\ntrainer: {epochs: 3}\n",
        "misspelt": "defaults: [base, _self_]\ntrainer: {polcy_mini_batch_size: 4}\n",
        "wrong_type": "defaults: [base, _self_]\ntrainer: {epochs: abc}\n",
        "torn": "defaults: [base, _self_]\ntrainer: [\n",
        "unbased": "trainer: {epochs: 3}\n",
        "on_nothing": "defaults: [quikstart, _self_]\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def refusal(*args: str, recipes: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        compose(args[0], args[1:], None if recipes is None else str(recipes))
    return str(error.value)


def test_the_home_of_the_user_may_be_written_as_a_tilde(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = (
        "trainer: {runs_dir: ~/runs, init_from: '~/old/run:best'}\ndata: {train_data: [~/a.jsonl, '~b.jsonl', c/~/d]}\n"
    )
    (recipes / "at_home.yaml").write_text(f"defaults: [base, _self_]\n{text}")
    config = compose("at_home", ["trainer.policy.model.path='~/model'"], str(recipes))
    assert (config.trainer.runs_dir, config.trainer.init_from) == ("/home/me/runs", "/home/me/old/run:best")
    assert config.data.train_data == ["/home/me/a.jsonl", "~b.jsonl", "c/~/d"]
    assert config.trainer.policy.model.path == "/home/me/model" and config.trainer.run_dir is None
    assert from_yaml(text).trainer.runs_dir == "/home/me/runs"


def test_threads_compose_at_the_same_time() -> None:
    seeds = range(20)
    with ThreadPoolExecutor(4) as pool:
        configs = pool.map(lambda seed: compose("quickstart", [f"trainer.seed={seed}"]), seeds)
    assert [config.trainer.seed for config in configs] == list(seeds)


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("mode", TrainerMode)
def test_every_recipe_composes_and_can_run_in_every_mode(name: str, mode: TrainerMode) -> None:
    config = compose(name, [f"trainer.mode={mode}"])
    assert type(config) is RunConfig
    assert config.trainer.mode == mode
    assert resolve(config, dataset_len=1000).total_steps > 0


def test_base_is_the_schemas_defaults() -> None:
    assert compose("base") == RunConfig()


def test_a_recipe_of_ones_own_builds_on_the_base_or_on_ours(recipes: Path) -> None:
    assert compose("mine", [], str(recipes)).environment.kwargs == {"a": 1}
    built = compose("on_ours", [], str(recipes))
    assert built.trainer.epochs == 3
    assert built.environment.env_class == compose("quickstart").environment.env_class


def test_with_a_folder_of_ones_own_our_recipes_stay_reachable(recipes: Path) -> None:
    assert compose("quickstart", [], str(recipes)) == compose("quickstart")


def test_a_recipe_may_be_a_file(recipes: Path) -> None:
    assert compose(str(recipes / "mine.yaml")).trainer.epochs == 3


def test_overrides_are_typed() -> None:
    config = compose(
        "base",
        [
            "trainer.epochs=2",
            "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
            "trainer.failures.on_rollout_failure=raise",
            "trainer.run_dir=null",
            "trainer.run_name=with space",
        ],
    )
    assert config.trainer.epochs == 2
    assert config.trainer.policy.optimizer_config.adam_betas == [0.9, 0.95]
    assert config.trainer.failures.on_rollout_failure is FailurePolicy["raise"]
    assert config.trainer.run_name == "with space"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_free_dictionaries_take_any_key(plus: str, recipes: Path) -> None:
    config = compose("mine", [f"{plus}environment.kwargs.b.c=3", f"{plus}generator.kwargs={{x: 1}}"], str(recipes))
    assert config.environment.kwargs == {"a": 1, "b": {"c": 3}}
    assert config.generator.kwargs == {"x": 1}


def test_a_key_of_a_recipe_in_a_free_dictionary_can_be_removed(recipes: Path) -> None:
    assert compose("mine", ["~environment.kwargs.a"], str(recipes)).environment.kwargs == {}
    assert "name the keys in it" in refusal("base", "~environment.kwargs")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.polcy_mini_batch_size=4", "trainer.policy_mini_batch_size"),
        ("+trainer.polcy_mini_batch_size=4", "trainer.policy_mini_batch_size"),
        ("trainer.lr=1", "trainer.policy.optimizer_config.lr"),
        ("max_staleness=3", "trainer.fully_async.max_staleness_steps"),
        ("trainer.policy={lr: 3}", "trainer.policy.optimizer_config.lr"),
        ("trainer/policy_mini_batch_size=4", "trainer.policy_mini_batch_size"),
        ("generator.agent=agent.py:run", "generator.kwargs.agent"),
        ("generator.command=[python,agent.py]", "generator.kwargs.command"),
        ("warmup_ratio=0.1", "trainer.policy.optimizer_config.num_warmup_steps"),
        (
            "trainer.critic.optimizer_config.lr_warmup_steps_ratio=0.1",
            "trainer.critic.optimizer_config.num_warmup_steps",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(override: str, meant: str) -> None:
    message = refusal("base", override)
    assert "Unknown setting" in message
    assert f"Did you mean {meant}?" in message


def test_an_unknown_key_in_a_recipe_is_named_too(recipes: Path) -> None:
    message = refusal("misspelt", recipes=recipes)
    assert "Unknown setting trainer.polcy_mini_batch_size (in misspelt)" in message
    assert "Did you mean trainer.policy_mini_batch_size?" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.epochs=abc", "trainer.epochs (in the overrides) must be an integer, got abc"),
        ("trainer.epochs=1.5", "must be an integer, got 1.5"),
        ("trainer.seed=null", "must be an integer, got null"),
        ("data.train_data=null", "data.train_data (in the overrides) must be a list, each entry text, got null"),
        ("trainer.resume=newest", "must be one of latest, never, got newest"),
        ("generator.verify_weights=3.5", "must be true or false, got 3.5"),
        (
            "trainer.trackers=tensorboard",
            "each entry text, got tensorboard. Write trainer.trackers=[tensorboard].",
        ),
        ("trainer.policy.optimizer_config.adam_betas=[0.9,x]", "a list, each entry a number, got [0.9,x]"),
        ("trainer=3", "trainer (in the overrides) must be a section of settings, got 3"),
    ],
)
def test_a_value_of_another_type_is_named_with_the_key_and_the_expected_type(override: str, expected: str) -> None:
    assert expected in refusal("base", override)


def test_a_section_without_settings_is_said_to_be_null(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("defaults: [base, _self_]\ntrainer:\n  fsdp:\n    # num_workers: 4\n")
    assert refusal("empty", recipes=tmp_path) == "trainer.fsdp (in empty) must be a section of settings, got null."


def test_a_wrong_type_in_a_recipe_is_named_too(recipes: Path) -> None:
    message = refusal("wrong_type", recipes=recipes)
    assert message == "trainer.epochs (in wrong_type) must be an integer, got abc."


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.epochs", "write key=value"),
        ("trainer.trackers=[a", "quote text with spaces or special characters"),
        ("~trainer.epochs", "cannot be removed"),
        ("trainer.epochs=1,2", "several values"),
        ("trainer.seed=???", "has no value"),
        ("trainer.seed=${trainer.bogus}", "'trainer.bogus' not found"),
        ("trainer.run_name=${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("trainer.run_name=it's", "\"trainer.run_name='it\\'s'\""),
        (f"{MULTIPLIERS}={{'*.lora_B.*':16}}", f'names in a mapping have no quotes: "{MULTIPLIERS}={{*.lora_B.*:16}}"'),
    ],
)
def test_an_override_that_cannot_be_read_says_how_to_write_it(override: str, expected: str) -> None:
    assert expected in refusal("base", override)


def test_the_proposed_spellings_are_read() -> None:
    assert compose("base", [r"trainer.run_name='it\'s'"]).trainer.run_name == "it's"
    factors = compose("base", [f"{MULTIPLIERS}={{*.lora_B.*:16}}"]).trainer.policy.optimizer_config.lr_multipliers
    assert factors == {"*.lora_B.*": 16.0}


def test_an_unknown_recipe_is_named_with_the_nearest_and_the_list(recipes: Path) -> None:
    message = refusal("quikstart")
    assert "Did you mean quickstart?" in message
    assert "sort_digits" in message
    assert "There is no recipe file" in refusal(str(recipes / "absent.yaml"))
    (recipes / "calculator.yaml").touch()
    assert f"Did you mean {recipes / 'calculator.yaml'}?" in refusal(str(recipes / "calculator.yml"))
    assert "Did you mean" not in refusal(str(recipes / "absent.yaml")), "a suffix is no likeness"
    assert "There is no recipe folder" in refusal("mine", recipes=recipes / "absent")


def test_the_folder_of_a_run_has_the_settings_of_the_run(tmp_path: Path) -> None:
    of_run = compose("guess_number", ["trainer.max_steps=7", "trainer.run_name=mine"])
    run = tmp_path / "guess_number-1"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(of_run))
    assert compose(str(run)) == of_run
    changed = compose("guess_number", ["trainer.max_steps=9", "trainer.run_name=mine"])
    assert compose(str(run), ["trainer.max_steps=9"]) == changed
    assert "give its folder" in refusal(str(run / "config.yaml"))
    assert "Unknown setting trainer.steps (in the overrides)" in refusal(str(run), "trainer.steps=1")


def test_a_recipe_that_cannot_be_composed_says_why(recipes: Path) -> None:
    assert "not readable yaml" in refusal("torn", recipes=recipes)
    assert "defaults: [base, _self_]" in refusal("unbased", recipes=recipes)
    assert "Did you mean quickstart?" in refusal("on_nothing", recipes=recipes)


@pytest.mark.parametrize("name", recipe_names())
def test_yaml_round_trip(name: str) -> None:
    config = compose(name, ["environment.kwargs.deep={a: [1, {b: null}]}"])
    assert from_yaml(to_yaml(config)) == config


@settings(max_examples=4)  # of a hundred texts each, because reading takes 0.1 s
@given(st.lists(st.text("$\\{}:a ", max_size=8) | st.text("1e-.", max_size=4), min_size=100, max_size=100))
def test_any_text_survives_yaml(texts: list[str]) -> None:
    config = RunConfig()
    config.trainer.run_name = texts[0]
    config.environment.kwargs = {"texts": texts, "deep": [{"text": texts[1]}]}
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("text", ["trainer: {bogus: 1}", "trainer: {epochs: x}", "- 1", "3", "a: [", "a: ${"])
def test_yaml_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_yaml(text)


@pytest.fixture
def composed_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in other files, for tests that only compare configurations."""
    composition.install(monkeypatch)


@pytest.mark.usefixtures("composed_in_short")
def test_the_same_run_may_live_elsewhere_and_be_watched_differently() -> None:
    ours = compose("quickstart")
    moved = compose("quickstart", ["trainer.run_dir=/x", "trainer.ckpt_interval=1", "trainer.trackers=[]"])
    assert not differences(ours, moved)


@pytest.mark.usefixtures("composed_in_short")
@pytest.mark.parametrize(
    "override",
    [
        "rollout.replay=false",  # what the record of unfinished rollouts asks for where it is broken
        "rollout.num_actors=2",
        "trainer.fsdp.environment={NCCL_DEBUG: INFO}",
        "trainer.failures.stuck_after_s=9",
        "trainer.failures.max_engine_failures=3",
        "generator.inference_engine.fleet.wait_timeout_s=9",
        "generator.kwargs={endpoint: {port: 8001, admin_key: another-key-of-32-characters-xyz}}",
    ],
)
def test_a_run_resumes_with_changed_settings_that_do_not_change_learning(override: str) -> None:
    assert not differences(compose("quickstart"), compose("quickstart", [override]))


@pytest.mark.usefixtures("composed_in_short")
@pytest.mark.parametrize("key", ["trainer.device", "trainer.critic.device", "rollout.stages.reference.device"])
def test_a_run_on_another_device_is_the_same_run(key: str) -> None:
    assert not differences(compose("quickstart"), compose("quickstart", [f"{key}=cuda:1"]))


@pytest.mark.usefixtures("composed_in_short")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.seed=1", "trainer.seed: was 0, now 1"),
        ("trainer.policy.optimizer_config.weight_decay=0.1", "weight_decay: was 0.0, now 0.1"),
        ("environment.kwargs={a: 1}", "environment.kwargs.a: was not set, now 1"),
        ("data.train_data=[x]", 'data.train_data: was [], now ["x"]'),
        ("generator.pause_mode=abort", 'generator.pause_mode: was "keep", now "abort"'),
    ],
)
def test_another_run_is_told_by_each_setting_with_both_values(override: str, told: str) -> None:
    (difference,) = differences(compose("quickstart"), compose("quickstart", [override]))
    assert told in str(difference)


@pytest.mark.usefixtures("composed_in_short")
@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["trainer.max_steps=2"], []),
        (["trainer.max_steps=2", "trainer.policy.optimizer_config.scheduler=cosine"], ["max_steps", "scheduler"]),
        (["trainer.policy.optimizer_config.lr=0.5"], ["lr"]),
        (["trainer.eval.pass_threshold=0.5", "trainer.eval.interval=3"], ["pass_threshold"]),
        (["generator.inference_engine.dtype=bfloat16", "generator.inference_engine.num_engines=2"], ["dtype"]),
    ],
)
def test_a_change_of_the_rest_of_a_run_is_a_warning(overrides: list[str], warned: list[str]) -> None:
    found = changes(compose("base"), compose("base", overrides))
    assert [change.key.rpartition(".")[2] for change in found if change.warning] == warned
    assert not any(change.another_run for change in found)


@pytest.mark.usefixtures("composed_in_short")
def test_a_run_that_has_long_prompts_resumes_with_them() -> None:
    error, keep, without = (
        compose("base", [f"data.on_long_prompt={action}"]) for action in ("error", "keep", "filter")
    )
    assert differences(error, keep) == differences(keep, error) == []
    assert differences(error, without) and differences(keep, without)


def test_each_setting_is_in_one_table_for_resumes_and_each_entry_decides() -> None:
    tables = [*MAY_CHANGE, *CHANGES_THE_REST, *MAKES_ANOTHER_RUN]
    assert len(tables) == len(set(tables))
    sections = {key.rpartition(".")[0] for key in known_keys()}
    free = {"generator.kwargs.endpoint"}  # in a dictionary with any keys
    assert {table_entry(key) for key in known_keys() if key not in sections} == set(tables) - free


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(set(known_keys()))), max_size=4, unique=True))
def test_a_run_resumes_unless_a_setting_changes_that_makes_another_run(keys: list[str]) -> None:
    keys = [key for key in keys if not is_dataclass(setting(RunConfig(), key))]
    other = RunConfig()
    for key in keys:
        section, _, name = key.rpartition(".")
        setattr(setting(other, section), name, "another value")
    found = changes(RunConfig(), other)
    places = {f"trainer.{name}" for name in ("run_name", "runs_dir", "run_dir", "resume", "resume_step")}
    assert {change.key for change in found} == set(keys) - places
    assert {change.key for change in differences(RunConfig(), other)} == {
        key for key in keys if table_entry(key) in MAKES_ANOTHER_RUN
    }


def test_a_word_of_a_name_is_better_evidence_than_similar_letters() -> None:
    assert nearest("async", ["sync", "one_step_off", "fully_async"]) == "fully_async"
    assert nearest("snyc", ["sync", "one_step_off", "fully_async"]) == "sync"


@given(st.sampled_from(sorted(known_keys())), st.data())
def test_one_missing_letter_still_finds_the_setting(key: str, data: st.DataObject) -> None:
    section, _, name = key.rpartition(".")
    if len(name) < 4:
        return
    cut = data.draw(st.integers(0, len(name) - 1))
    misspelt = f"{section}.{name[:cut]}{name[cut + 1 :]}" if section else name[:cut] + name[cut + 1 :]
    if misspelt not in known_keys():
        found = nearest(misspelt, known_keys())
        assert found is not None


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer={max_steps: 3}", "+trainer.seed=4", "data.train_data=[a, b]", "trainer.mode=sync"],
        ["generator.kwargs.a=1", "generator.kwargs.b={c: 3}", "~generator.kwargs.a"],
        ["trainer.algorithm.off_policy_correction.rejections=[{statistic: k3}]"],
        ["trainer.algorithm.off_policy_correction.rejections=[{statistc: k3}]"],
        ["trainer.max_steps=x"],
        ["trainer=3"],
        ["~generator.kwargs.a"],
        ["generator.sampling_params.max_tokens=null"],
    ],
    ids=str,
)
def test_other_tests_compose_in_short_what_is_composed_here(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> RunConfig | str:
        try:
            return compose("quickstart", overrides)
        except ConfigError as error:
            return str(error)

    in_full = outcome()
    composition.install(monkeypatch)
    assert outcome() == in_full
    assert outcome() == in_full, "what was parsed once has not changed"
    assert compose("quickstart") != in_full, "what was composed once has not changed"


def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from skyrl_train import compose; from skyrl_train.config.plan import resolve;"
        "resolve(compose('quickstart'), 10); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
