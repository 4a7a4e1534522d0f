"""Results and schedule of an evaluation, its rows, and the validation of its settings."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from composition import settings
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from skyrl_train.config import derive
from skyrl_train.config.compare import changes
from skyrl_train.config.schema import EnvironmentConfig, RunConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.evaluation.data import load_evaluation_prompts
from skyrl_train.evaluation.metrics import (
    EvaluatedPrompt,
    EvaluatedSample,
    EvaluationResult,
    avg_at_k,
    pass_at_k,
    passed,
    powers_up_to,
)
from skyrl_train.evaluation.runner import EvaluationSchedule
from skyrl_train.observability.metrics import spec_of
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.observability.trackers.feed import TrackerFeed
from skyrl_train.observability.trackers.tracker import Tracker

# Figures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_one_that_passed(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@given(st.integers(1, 400), st.data())
def test_pass_at_k_grows_with_k_and_stays_a_probability_for_many_samples(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    values = [pass_at_k(n, correct, k) for k in powers_up_to(n)]
    assert values == sorted(values) and values[0] == pytest.approx(correct / n)
    assert values[-1] == float(correct > 0)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_avg_at_k_is_the_pass_rate_of_the_first_k_samples_and_pass_at_1_with_all_of_them(outcomes: list[bool]) -> None:
    n = len(outcomes)
    assert avg_at_k(outcomes, n) == pytest.approx(pass_at_k(n, sum(outcomes), 1))
    assert all(avg_at_k(outcomes, k) == sum(outcomes[i] for i in range(k)) / k for k in powers_up_to(n))


@pytest.mark.parametrize(
    ("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_k_doubles_up_to_n(n: int, ks: list[int]) -> None:
    assert powers_up_to(n) == ks


def test_a_reward_passes_at_the_threshold_up_to_rounding_and_not_below_it() -> None:
    assert passed(sum([0.1] * 10), 1.0), "ten times a tenth is a little less than 1"
    assert passed(1.0, 1.0) and passed(2.0, 1.0) and not passed(0.999, 1.0)
    assert passed(0.0, 0.0) and not passed(-0.5, 0.0)


def sample(reward: float, *, threshold: float = 1.0, tokens: int = 1, truncated: bool = False) -> EvaluatedSample:
    return EvaluatedSample(reward, passed(reward, threshold), tokens, truncated)


FAILED = EvaluatedSample(None, False, failure="scripted")


def test_figures_are_of_all_prompts_and_of_each_data_source() -> None:
    result = EvaluationResult(
        7,
        (
            EvaluatedPrompt("a", "org/math", (sample(1.0, tokens=3), sample(0.0, tokens=5, truncated=True))),
            EvaluatedPrompt("b", "org/math", (sample(0.5), sample(0.5))),
            EvaluatedPrompt("c", "code", (sample(1.0), sample(1.0))),
            EvaluatedPrompt("d", "", (sample(0.0), sample(0.0))),
        ),
        seconds=2.0,
    )
    expected = {
        "pass@1": [(0.5 + 0 + 1 + 0) / 4, (0.5 + 0) / 2, 1.0],
        "pass@2": [2 / 4, 1 / 2, 1.0],
        "avg@1": [(1 + 0 + 1 + 0) / 4, 1 / 2, 1.0],
        "avg@2": [(0.5 + 0 + 1 + 0) / 4, (0.5 + 0) / 2, 1.0],
        "reward": [4.0 / 8, 2.0 / 4, 1.0],
        "response_tokens": [14 / 8, 10 / 4, 1.0],
        "truncated": [1 / 8, 1 / 4, 0.0],
        "prompts": [4, 2, 1],
        "failed": [0, 0, 0],
    }
    prefixes = ("eval", "eval/org/math", "eval/code")
    flat = {f"{p}/{name}": values[i] for name, values in expected.items() for i, p in enumerate(prefixes)}
    assert result.metrics == pytest.approx({**flat, "eval/seconds": 2.0})
    assert result.row["policy_version"] == 7 and result.row["failures"] == []
    assert all(spec_of(name).name.startswith("eval/") for name in result.metrics)


def test_a_failed_sample_has_not_passed_and_has_no_reward() -> None:
    prompts = (EvaluatedPrompt("a", "", (sample(1.0), FAILED, sample(0.5))),)
    result = EvaluationResult(7, prompts, seconds=65)
    assert result.metrics["eval/pass@1"] == pytest.approx(1 / 3) and result.metrics["eval/reward"] == 0.75
    assert result.metrics["eval/failed"] == 1
    assert result.row["failures"] == [{"uid": "a", "sample": 1, "reason": "scripted"}]
    assert result.headline == (
        "evaluation of version 7: pass@1 0.333, pass@3 1.000, reward 0.750 (1 prompt x 3 samples, 1:05); 1 sample failed, "
        "counted as not passed (last: scripted)"
    )
    nothing = EvaluationResult(7, (EvaluatedPrompt("a", "", (FAILED,)),), seconds=0)
    assert nothing.metrics["eval/pass@1"] == 0 and "eval/reward" not in nothing.metrics
    assert "pass@1 0.000 (1 prompt x 1 sample, 0:00)" in nothing.headline


# Schedule -----------------------------------------------------------------------------------------------------------


def test_every_interval_and_before_the_first_step_if_asked() -> None:
    schedule = EvaluationSchedule(interval=3, before_train=True)
    assert [step for step in range(9) if schedule.due(step)] == [0, 3, 6]
    assert not EvaluationSchedule(3, before_train=False).due(0)
    assert not any(EvaluationSchedule(0, before_train=True).due(step) for step in range(9))


@given(st.integers(0, 5), st.booleans(), st.integers(0, 20), st.data())
def test_a_run_owes_the_newest_evaluation_that_was_due_and_has_no_row(
    interval: int, before: bool, step: int, data: st.DataObject
) -> None:
    schedule = EvaluationSchedule(interval, before)
    reported = data.draw(st.sets(st.integers(0, step)))
    due = [s for s in range(step + 1) if schedule.due(s)]
    assert schedule.missed(step, reported) == (bool(due) and not any(r >= due[-1] for r in reported))


# Reports ---------------------------------------------------------------------------------------------------


class Remembering(Tracker):
    logged: list[tuple[int, dict[str, float]]]

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        type(self).logged = []

    def log(self, step: int, metrics: Any) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        return


def result_of(version: int, reward: float = 1.0) -> EvaluationResult:
    return EvaluationResult(version, (EvaluatedPrompt("a", "s", (sample(reward),)),), seconds=1.0)


def report(reporter: Reporter, result: EvaluationResult) -> None:
    reporter.evaluated(result.version, result.row, result.metrics, result.headline)


def test_a_result_reaches_its_file_the_trackers_and_the_screen_under_its_step(tmp_path: Path) -> None:
    config = RunConfig()
    config.trainer.trackers = [f"{__name__}.Remembering"]
    screen = StringIO()
    with closing(RunFolder(tmp_path, config)) as folder, closing(TrackerFeed(tmp_path, config)) as trackers:
        reporter = Reporter(config, folder, Console(file=screen, width=200), 9, trackers)
        reporter.begin(0)
        report(reporter, result_of(3, reward=0.5))
        reporter.close()
    (row,) = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert (row["step"], row["policy_version"], row["eval/pass@1"], row["eval/s/reward"]) == (3, 3, 0.0, 0.5)
    assert Remembering.logged == [(3, result_of(3, 0.5).metrics)]
    assert "evaluation of version 3: pass@1 0.000, reward 0.500" in screen.getvalue()


def test_a_resumed_run_forgets_evaluations_of_steps_that_are_gone_and_knows_the_others(tmp_path: Path) -> None:
    config = RunConfig()
    config.trainer.trackers = []
    for resumed_at, versions, known in ((0, (2, 4, 6), set()), (5, (6,), {2, 4})):
        with closing(RunFolder(tmp_path, config)) as folder:
            reporter = Reporter(config, folder, Console(file=StringIO()), total_steps=9)
            reporter.begin(resumed_at)
            assert reporter.evaluated_steps == known
            for version in versions:
                report(reporter, result_of(version))
            rows = list(read_jsonl(folder.evaluations.path))
            reporter.close()
    assert [row["step"] for row in rows] == [2, 4, 6]


# Prompts and settings -----------------------------------------------------------------------------------------------


def test_prompts_are_made_by_the_environment_or_read_from_files(tmp_path: Path) -> None:
    alphabet = "trainer.policy.model.build.alphabet=0123456789abcdef="
    made = load_evaluation_prompts(settings("trainer.eval.interval=1", "trainer.eval.generate=5", alphabet))
    assert len(made) == 5 and {record.data_source for record in made} == {"run_length"}
    (tmp_path / "held.jsonl").write_text('{"question": "01a=", "answer": "a", "data_source": "easy"}\n')
    read = load_evaluation_prompts(
        settings(
            "trainer.eval.interval=1",
            alphabet,
            f"trainer.eval.eval_data=[{tmp_path / 'held.jsonl'}]",
            "data.prompt_key=question",
        )
    )
    assert [record.data_source for record in read] == ["easy"]
    assert load_evaluation_prompts(settings("trainer.eval.eval_data=[nowhere.jsonl]")) == ()


@pytest.mark.parametrize("metric", ["eval/reward", "eval/pass@4", "eval/avg@3", "eval/held_out/pass@1"])
def test_the_best_checkpoint_is_judged_by_a_score_that_the_evaluation_has(tmp_path: Path, metric: str) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1"}\n')
    given = ["trainer.eval.interval=2", "trainer.eval.n_samples_per_prompt=3", f"trainer.eval.eval_data=[{held_out}]"]
    config = settings(*given, f"trainer.eval.best_metric={metric}", base="quickstart")
    result = EvaluationResult(1, (EvaluatedPrompt("a", "held_out", (EvaluatedSample(1.0, True),) * 3),), 1.0)
    if metric in result.metrics:
        assert len(load_evaluation_prompts(config)) == 1
    else:
        with pytest.raises(ConfigError, match=rf"best_metric={metric}.*no such score.*eval/(pass|avg)@"):
            load_evaluation_prompts(config)


def test_errors_of_the_prompts_name_the_settings_of_the_evaluation() -> None:
    with pytest.raises(DataError, match=r"Correct trainer\.eval\.eval_data"):
        load_evaluation_prompts(settings("trainer.eval.interval=1", "trainer.eval.eval_data=[nowhere.jsonl]"))
    with pytest.raises(ConfigError, match="prompts of the evaluation: The prompts contain '=abcdef'"):
        load_evaluation_prompts(settings("trainer.eval.interval=1"))
    config = settings("trainer.eval.interval=1", "trainer.eval.generate=0")
    config.environment = EnvironmentConfig()
    with pytest.raises(ConfigError, match=r"trainer\.eval\.generate must be at least 1"):
        load_evaluation_prompts(config)


HARNESS = ("generator.name=harness", "generator.kwargs.endpoint.port=8000", "generator.kwargs.agent=a:b")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["interval=-1"], "trainer.eval.interval=-1"),
        (["num_engines=-1"], "at least 0"),
        (["generate=0"], "trainer.eval.generate=0"),
        (["n_samples_per_prompt=0"], "trainer.eval.n_samples_per_prompt=0"),
        (["max_parallel=0"], "trainer.eval.max_parallel=0"),
        (["pass_threshold=.nan"], "pass_threshold=nan"),
        (["seed=0"], "Set trainer.eval.seed=1"),
        (["sampling_params.temprature=1.0"], "Did you mean temperature?"),
        (["sampling_params.temperature=hot"], "must be a number"),
        (["sampling_params.max_tokens=1.5"], "must be an integer"),
        (["sampling_params.ignore_eos=1"], "must be true or false"),
        (["sampling_params.temperature=-1"], "trainer.eval.sampling_params.temperature=-1"),
        (["sampling_params.top_p=2"], "trainer.eval.sampling_params.top_p=2"),
        (["sampling_params.max_tokens=0"], "trainer.eval.sampling_params.max_tokens=0"),
        (["sampling_params.max_tokens=4000"], "max_model_len=4256"),
    ],
)
def test_impossible_settings_are_rejected_with_a_remedy(overrides: list[str], message: str) -> None:
    config = settings("trainer.eval.interval=2", *(f"trainer.eval.{override}" for override in overrides))
    found = validate(config).errors
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["interval=0", "before_train=true"], "Set the interval"),
        (["interval=0", "num_engines=1"], "num_engines=1 without trainer.eval.interval"),
        (["interval=0", "best_metric=eval/reward"], "best_metric=eval/reward without trainer.eval.interval"),
    ],
)
def test_an_evaluation_without_an_interval_is_a_warning(overrides: list[str], message: str) -> None:
    config = settings("trainer.eval.interval=2", *(f"trainer.eval.{override}" for override in overrides))
    found = validate(config)
    assert found.errors == [] and any(message in warning for warning in found.warnings), found
    assert derive.num_evaluation_engines(config) == 0


def test_the_runs_engines_must_hold_the_version_that_is_due() -> None:
    batches = ("trainer.policy_mini_batch_size=4", "trainer.train_batch_size=8")
    (problem,) = validate(settings("trainer.eval.interval=3", *batches)).errors
    assert "trainer.eval.interval=4" in problem and "trainer.eval.num_engines=1" in problem
    assert validate(settings("trainer.eval.interval=4", *batches)).errors == []
    assert validate(settings("trainer.eval.interval=3", "trainer.eval.num_engines=1", *batches)).errors == []


def test_an_evaluation_with_engines_of_its_own_needs_a_port_and_servers_of_its_own() -> None:
    own = ("trainer.eval.interval=2", "trainer.eval.num_engines=1")
    assert "Leave the port out" in validate(settings(*own, *HARNESS)).errors[0]
    assert validate(settings("trainer.eval.interval=2", *HARNESS)).errors == []
    remote = ("generator.inference_engine.backend=vllm_remote", "generator.inference_engine.remote_urls=[http://a]")
    assert "the last ones for the evaluation" in validate(settings(*own, *remote)).errors[0]


def test_schedule_and_engines_may_change_on_a_resume_and_another_meaning_of_a_row_is_a_warning() -> None:
    run = settings("trainer.eval.interval=2")
    for override in ("interval=4", "before_train=true", "max_parallel=2", "num_engines=1"):
        (change,) = changes(run, settings("trainer.eval.interval=2", f"trainer.eval.{override}"))
        assert not change.another_run and not change.warning
    for override in ("pass_threshold=0.5", "generate=8", "seed=9", "n_samples_per_prompt=4"):
        (change,) = changes(run, settings("trainer.eval.interval=2", f"trainer.eval.{override}"))
        assert not change.another_run and "cannot be compared" in change.warning
