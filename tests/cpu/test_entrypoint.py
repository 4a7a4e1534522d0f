"""The command: exit codes and messages for bad input, the run folder for good input."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoint_worlds import writing
from forks import Forks
from recorded import samples_of
from safetensors.torch import load_file
from transformers import AutoTokenizer

from skyrl_train.build.export import export_in_process
from skyrl_train.config.compose import compose
from skyrl_train.config.memory import Machine
from skyrl_train.config.schema import BuildModelConfig, RunConfig
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.evaluate import for_evaluation
from skyrl_train.entrypoints.generation import without_trainer
from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.evaluation.data import load_evaluation_prompts
from skyrl_train.generators.gym import GymGenerator
from skyrl_train.models.folder import load_model
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.readers.folders import RunsFolder
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.rollout.stages.reward import GroupToReward
from skyrl_train.training.checkpoint import CheckpointStore
from skyrl_train.types import GeneratorInput, GeneratorOutput

HERE = __name__
TINY = [
    "quickstart",
    "trainer.policy_mini_batch_size=2",
    "trainer.max_steps=3",
    "trainer.policy.optimizer_config.num_warmup_steps=0",
    "trainer.ckpt_interval=2",
    "trainer.trackers=[]",
    "trainer.policy.model.build.hidden_size=32",
    "generator.n_samples_per_prompt=2",
    "generator.inference_engine.executor=thread",
    "data.generate=8",
]


class Raises(Environment):
    """Takes any prompt and breaks at the first step."""

    is_blocking = False

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)

    def step(self, action: str) -> EnvironmentStep:
        raise ValueError("scripted environment failure")


class NanRewards(GymGenerator):
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        output["rewards"] = [math.nan] * len(output["response_ids"])
        return output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_training_begins_is_as_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    cleaned_up: list[bool] = []

    async def starting(*arguments: object) -> bool:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(0)
        finally:
            cleaned_up.append(True)
        return False

    monkeypatch.setattr("skyrl_train.entrypoints.run._train", starting)
    before = signal.signal(number, lambda *arguments: pytest.fail("it would have ended the tests"))
    try:
        assert main(["train", *TINY, f"trainer.run_dir={tmp_path}"]) == 130
    finally:
        signal.signal(number, before)
    assert cleaned_up == [True]
    assert "interrupted before training began" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (130, "stopped")])
def test_a_start_that_ends_before_training_has_its_end_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    async def starting(*arguments: object) -> None:
        if code == 130:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
        raise EngineError("no engine")

    monkeypatch.setattr("skyrl_train.build.trainer.build_trainer", starting)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what would end the tests
    try:
        assert main(["train", *TINY, f"trainer.run_dir={tmp_path / 'run'}"]) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert RunsFolder(tmp_path).row("run")["state"] == state
    ends = [event for event in load_run(tmp_path / "run").events if event["kind"] == "end"]
    assert [(end["step"], end["error"]) for end in ends] == [(0, "EngineError: no engine" if code == 1 else None)]


def test_ctrl_c_while_the_report_is_written_ends_the_report_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def trained(*arguments: object) -> bool:
        return True

    monkeypatch.setattr("skyrl_train.entrypoints.run._train", trained)
    monkeypatch.setattr("skyrl_train.observability.report.files.write_report", Mock(side_effect=KeyboardInterrupt))
    assert main(["train", *TINY, f"trainer.run_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert "Finished after" in shown.out and "interrupted" not in shown.err
    assert "`skyrl-train report` writes it" in (tmp_path / "logs" / "trainer.log").read_text()


@pytest.mark.parametrize(("steps", "code"), [(4, 0), (5, 3)])
def test_a_run_that_had_nothing_to_learn_from_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], steps: int, code: int
) -> None:
    async def training(inputs: object, run_folder: RunFolder, *arguments: object) -> bool:
        for step in range(1, steps + 1):
            run_folder.metrics.append({"step": step, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0})
        return True

    monkeypatch.setattr("skyrl_train.entrypoints.run._train", training)
    ended, text = run(tmp_path, capfd)
    assert ended == code
    before, _, after = text.partition("Nothing was learned: all samples have the reward 0,")
    assert after
    assert before.splitlines()[-1].startswith("alarm: All samples of the last 5 steps have the reward 0") is (
        steps >= 5
    )


def prompts(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    return f"data.train_data=[{path}]"


def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], *overrides: str, verb: str = "train") -> tuple[int, str]:
    code = main([verb, *TINY, f"trainer.run_dir={tmp_path / 'run'}", *overrides])
    out, err = capfd.readouterr()
    return code, out + err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.polcy_mini_batch_size=4", "policy_mini_batch_size"),
        ("trainer.mode=asink", "fully_async"),
        ("trainer.fully_async.num_parallel_generation_workers=1", "num_parallel_generation_workers"),
        ("trainer.fully_async.max_staleness_steps=-1", "max_staleness_steps"),
        ("trainer.fully_async.generate_ahead_steps=9", "generate_ahead_steps"),
        ("trainer.fully_async.streaming_min_groups=3", "streaming_min_groups"),
        ("trainer.max_steps=0", "max_steps"),
        ("trainer.algorithm.policy_loss_type=ppo_klip", "ppo_clip"),
        ("data.train_data=[nowhere.jsonl]", "nowhere.jsonl"),
        ("environment.env_class=run_lenght", "run_length"),
        ("trainer.policy.model.path=./no/such/model", "no/such/model"),
        ("trainer.policy.model.build.alphabet=xyz", "alphabet"),
        ("generator.name=nowhere:Generator", "file.py:Class"),
        ("trainer.device=gpu", "trainer.device=gpu is unknown"),
        ("data.sampler=shufle", "Did you mean shuffle?"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_before_anything_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    code, text = run(tmp_path, capfd, override)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no rows"), ('{"prompt": "12"}\n{"prompt": \n', "prompts.jsonl:2"), ('{"question": "1"}\n', "prompt")],
)
def test_a_broken_data_file_is_refused_with_its_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    code, text = run(tmp_path, capfd, prompts(tmp_path, content))
    assert code == 2
    assert message in text


def test_a_model_folder_without_weights_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    build_model_folder(BuildModelConfig(alphabet="0123456789=abcdef"), folder, seed=0)
    (folder / "model.safetensors").unlink()
    code, text = run(tmp_path, capfd, f"trainer.policy.model.path={folder}")
    assert code == 2
    assert "weights" in text


def test_the_checkpoint_of_another_model_is_refused_and_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    build = BuildModelConfig(alphabet="0123456789=abcdef", hidden_size=32, num_heads=2)
    build_model_folder(build, folder, seed=0)
    model = f"trainer.policy.model.path={folder}"
    assert run(tmp_path, capfd, model)[0] == 0
    (tmp_path / "run" / "finished.json").unlink()  # as if killed just before its end
    shutil.rmtree(folder)
    build_model_folder(BuildModelConfig(alphabet="0123456789=abcdef", hidden_size=64, num_heads=2), folder, seed=0)
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    code, text = run(tmp_path, capfd, model)
    assert code == 1
    assert "another model" in text
    assert {path: path.read_bytes() for path in before} == before


def raising_reward(group: GroupToReward) -> list[float]:
    raise ValueError("scripted reward failure")


@pytest.mark.parametrize(
    ("settings", "reason", "function"),
    [
        (f"environment.env_class={HERE}:Raises", "scripted environment failure", "step"),
        (
            f"environment.env_class=single_turn rollout.stages.reward.function={HERE}:raising_reward",
            "scripted reward failure",
            "raising_reward",
        ),
    ],
)
def test_own_code_that_always_raises_ends_the_run_after_three_groups_with_its_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: str, reason: str, function: str
) -> None:
    data = prompts(tmp_path, "".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(8)))
    code, text = run(tmp_path, capfd, data, *settings.split())
    assert code == 1
    place = rf"\S*test_entrypoint\.py:\d+ in {function}"
    assert re.search(rf"RolloutError: The first 3 groups all failed at {place}, .*{reason}", text)
    assert re.search(rf"The code that failed: {place}\. `skyrl-train try`", text)
    first = next(line for line in text.splitlines() if reason in line)
    assert re.match(r"group \d+: an attempt failed", first)  # at once, before the run gives up
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "global_step_0"
    report = (tmp_path / "run" / "report.md").read_text()
    assert "The run failed after step 0" in report and reason in report


def test_a_generator_with_nan_rewards_ends_the_run_naming_the_field(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = run(tmp_path, capfd, f"generator.name={HERE}:NanRewards")
    assert code == 1
    assert "rewards" in text
    assert "NaN" in text or "nan" in text


def test_a_refusal_before_or_after_the_engines_processes_have_started_leaves_no_traceback_and_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = "generator.inference_engine.executor=process"
    before = set(multiprocessing.active_children())  # of other tests
    code, text = run(tmp_path, capfd, process, "generator.name=nowhere:Generator")
    assert code == 2
    assert "generator.name" in text
    assert "Traceback" not in text
    (tmp_path / "run").write_text("no folder")
    code, text = run(tmp_path, capfd, process)
    assert code == 2
    assert "trainer.run_dir" in text
    assert "Traceback" not in text
    assert set(multiprocessing.active_children()) <= before


def test_a_run_leaves_its_folder_and_a_finished_one_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], forks: Forks
) -> None:
    monkeypatch.setattr("skyrl_train.build.export.subprocess", forks)
    code, text = run(tmp_path, capfd, "trainer.trackers=[tensorboard]", "trainer.hf_save_interval=2")
    assert code == 0
    assert "in 3 steps" in text
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "logs",
        "model",
        "policy",
        "report.html",
        "report.md",
    }
    assert "step 3 of 3" in (folder / "report.md").read_text()
    assert load_model(str(folder / "policy"), "float32", "cpu").config.hidden_size == 32
    assert (folder / "checkpoints" / "latest").read_text().strip() == "global_step_3"
    assert list(folder.glob("logs/tensorboard/run/events*"))
    log = (folder / "logs" / "trainer.log").read_text()
    for fact in ("start-up: engines and training backend took", "steps", "policy version 3 reached the engines"):
        assert fact in log
    sample = samples_of(folder)[0]
    assert sample["prompt"].endswith("=") and sample["trainer_logprobs"] is not None
    assert json.loads((folder / "finished.json").read_text())["steps"] == 3
    code, text = run(tmp_path, capfd, "trainer.trackers=[tensorboard]")
    assert code == 0
    assert "has finished" in text
    before = {path.name for path in folder.iterdir()}
    for number, target in (("", "of-3"), (":2", "of-2"), (":3", "again-3")):
        assert main(["export", f"{folder}{number}", str(tmp_path / "new" / target)]) == 0
    capfd.readouterr()
    assert main(["export", str(folder), str(folder / "config.yaml" / "policy")]) == 1
    assert "cannot be made: " in capfd.readouterr().err
    for arguments in ([str(folder)], [str(tmp_path / "new" / "of-3"), "--recipe", "quickstart"]):
        assert (
            main(["eval", *arguments, TINY[-2], "trainer.eval.generate=5", "trainer.eval.n_samples_per_prompt=2"]) == 0
        )
    shown = capfd.readouterr().out
    assert shown.count("(5 prompts x 2 samples") == shown.count("eval/pass@2 ") == 2
    assert {path.name for path in folder.iterdir()} == before, "an evaluation writes nothing"
    exported = {path.name: load_file(path / "model.safetensors") for path in (tmp_path / "new").iterdir()}
    final = load_file(folder / "policy" / "model.safetensors")
    assert all(torch.equal(exported["of-3"][name], final[name]) for name in final)
    assert all(torch.equal(exported["again-3"][name], final[name]) for name in final)
    assert not all(torch.equal(exported["of-2"][name], final[name]) for name in final)
    assert [path.name for path in (folder / "policies").iterdir()] == ["global_step_2"]
    during = load_file(folder / "policies" / "global_step_2" / "model.safetensors")
    assert all(torch.equal(during[name], exported["of-2"][name]) for name in final)
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "of-2").eos_token_id is not None


class Exports:
    """Stands for ``subprocess``: what the processes that export do, one after the other, and the codes that they end with."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, *processes: Callable[[], int]) -> None:
        self.left = list(processes)

    def Popen(self, command: list[str], **_: object) -> Mock:
        return Mock(wait=self.left.pop(0))


@pytest.mark.parametrize("again", ["written again", "as it was"])
def test_an_export_begins_again_if_a_stop_has_written_its_checkpoint_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, again: str
) -> None:
    folder = RunFolder(tmp_path / "run", RunConfig())
    folder.close()
    store = CheckpointStore(folder.checkpoints, 1)
    store.write(4, writing("four"))

    def fails() -> int:
        if again == "written again":
            store.write(4, writing("four"))
        return 1

    exports = Exports(fails, lambda: 0)
    monkeypatch.setattr("skyrl_train.build.export.subprocess", exports)
    export_in_process(folder, 4)
    assert (len(exports.left), "was not exported" in caplog.text) == (
        (0, False) if again == "written again" else (1, True)
    )


def test_a_run_on_another_machine_starts_from_the_same_policy_though_its_source_has_trained_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, *overrides: str) -> tuple[int, str]:
        (tmp_path / name).mkdir(exist_ok=True)
        short = ["trainer.policy.optimizer_config.lr=0.01", "trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=9"]
        return run(tmp_path / name, capfd, *short, *overrides)

    def begun(name: str) -> bytes:
        return (tmp_path / name / "run" / "model" / "model.safetensors").read_bytes()

    source = tmp_path / "source" / "run"
    shared = [f"trainer.init_from={source}", f"trainer.ckpt_path=file://{tmp_path}/bucket"]
    assert train("source", "trainer.max_steps=1")[0] == 0
    assert train("first", *shared, "trainer.max_steps=1")[0] == 0
    assert train("source", "trainer.max_steps=2")[0] == 0
    assert train("second", *shared, "trainer.max_steps=2")[0] == 0
    assert begun("second") == begun("first") and load_run(tmp_path / "second" / "run").origin["step"] == 1
    shutil.rmtree(source / "checkpoints" / "global_step_1")
    code, text = train("third", *shared, "trainer.max_steps=2")
    assert code == 2 and f"started from step 1 of {source}" in text and "copy the run folder" in text


def test_the_commands_that_a_run_prints_can_be_pasted_where_folders_have_spaces(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_LAUNCHER", "/my clone/uvw")
    folder = tmp_path / "my runs" / "run"
    assert main(["train", *TINY, "trainer.max_steps=1", f"trainer.run_dir={folder}"]) == 0
    lines = [line.partition(":") for line in capfd.readouterr().out.splitlines()]
    printed = {name: shlex.split(command) for name, _, command in lines if name in ("Look at it", "Train again")}
    assert all(words[:2] == ["/my clone/uvw", "run"] for words in printed.values())
    assert printed["Look at it"][-2:] == ["page", str(folder.parent)]
    overrides = printed["Train again"][printed["Train again"].index(TINY[0]) + 1 :]
    assert compose(TINY[0], overrides).trainer.run_dir == f"{folder}-2"


@pytest.mark.parametrize(("of_recipe", "overrides"), [("never", []), ("latest", ["trainer.resume=never"])])
def test_the_command_that_continues_a_run_resumes_it_whatever_the_recipe_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of_recipe: str,
    overrides: list[str],
) -> None:
    async def stopped(*arguments: object) -> bool:
        return False

    monkeypatch.setattr("skyrl_train.entrypoints.run._train", stopped)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"defaults: [quickstart, _self_]\ntrainer: {{resume: {of_recipe}}}\n")
    assert main(["train", str(recipe), *TINY[1:], *overrides, f"trainer.runs_dir={tmp_path}"]) == 0
    (again,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Start again:")]
    words = shlex.split(again.partition(":")[2])
    assert main(words[words.index("train") :]) == 0
    assert capsys.readouterr().out.count("Start again:") == 1


def test_a_run_resumes_from_an_earlier_checkpoint_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = ["trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=9"]
    assert run(tmp_path, capfd, *saved)[0] == 0
    folder = tmp_path / "run"
    begun = list(read_jsonl(folder / "metrics.jsonl"))
    code, text = run(tmp_path, capfd, *saved, "trainer.resume_step=2")
    assert code == 0 and "resuming after step 2" in text
    (again,) = [line for line in text.splitlines() if line.startswith("Train again:")]
    assert again.endswith(f" trainer.run_dir={folder}-2") and "resume_step" not in again
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[:2] == begun[:2] and rows[2]["time"] > begun[2]["time"]
    code, text = run(tmp_path, capfd, *saved, "trainer.resume_step=2")
    assert code == 0 and "has finished training" in text, "the same command continues, and here nothing is left"
    assert list(read_jsonl(folder / "metrics.jsonl")) == rows

    code, text = run(tmp_path, capfd, *saved, "trainer.resume_step=7")
    assert code == 2 and "has no checkpoint of step 7 here. Steps: 1, 2, 3. A run keeps the newest ones, " in text
    code, text = run(tmp_path / "none", capfd, *saved, "trainer.resume_step=1")
    assert code == 2 and "has no run to resume" in text and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "Name its folder in trainer.run_dir"),
        (["trainer.run_dir=x", "trainer.resume=never"], "with trainer.resume=never"),
        (["trainer.run_dir=x", "trainer.ckpt_path=s3://x/y"], "write global_step_5 into s3://x/y/latest"),
    ],
)
def test_a_step_to_resume_from_needs_a_run_on_this_disk(overrides: list[str], told: str) -> None:
    errors = validate(compose("quickstart", ["trainer.resume_step=5", *overrides])).errors
    assert any(told in error for error in errors)


@pytest.mark.parametrize("lora", [[], ["trainer.policy.model.lora.rank=2"]], ids=["whole", "adapter"])
def test_a_run_starts_from_the_policy_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lora: list[str]
) -> None:
    pytest.importorskip("peft")
    (tmp_path / "old").mkdir()
    short = ["trainer.max_steps=2", "trainer.ckpt_interval=1", "trainer.policy.optimizer_config.lr=0.01", *lora]
    assert run(tmp_path / "old", capfd, *short)[0] == 0
    source = tmp_path / "old" / "run"
    assert main(["export", f"{source}:1", str(tmp_path / "policy")]) == 0
    start = f"trainer.init_from={source}:1"
    if not lora:  # a start that fails leaves another policy in the same folder
        with monkeypatch.context() as patch:
            patch.setattr("skyrl_train.build.trainer.check_template", Mock(side_effect=ConfigError("no template")))
            code, text = run(tmp_path, capfd, *short, f"trainer.init_from={source}:2")
            assert code == 2 and "no template" in text and (tmp_path / "run" / "model").is_dir()
    code, text = run(tmp_path, capfd, *short, start)
    assert code == 0 and "in 2 steps" in text
    new = tmp_path / "run"
    begun, policy = (load_file(folder / "model.safetensors") for folder in (new / "model", tmp_path / "policy"))
    assert begun.keys() == policy.keys() and all(torch.equal(begun[name], policy[name]) for name in policy)
    initial = load_file(source / "model" / "model.safetensors")
    assert any(not torch.equal(begun[name], initial[name]) for name in policy)
    assert load_run(new).origin == {"run": str(source), "step": 1} and load_run(source).origin is None
    shutil.rmtree(source)  # a resume does not need it
    code, text = run(tmp_path, capfd, *short, start, "trainer.max_steps=3")
    assert code == 0 and "trainer.max_steps: was 2, now 3" in text and "in 3 steps" in text
    assert [row["step"] for row in read_jsonl(new / "metrics.jsonl")] == [1, 2, 3]
    assert main(["export", f"{new}:3", str(tmp_path / "final")]) == 0
    exported, final = (load_file(folder / "model.safetensors") for folder in (tmp_path / "final", new / "policy"))
    assert all(torch.equal(exported[name], final[name]) for name in final)


def test_a_run_starts_from_the_critic_of_another_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").mkdir()
    settings = ["trainer.algorithm.advantage_estimator=gae", "trainer.max_steps=1"]
    assert run(tmp_path / "old", capfd, *settings, "trainer.critic.optimizer_config.lr=0.01")[0] == 0
    # Its step is too small to move anything.
    start = [f"trainer.init_from={tmp_path / 'old' / 'run'}", "trainer.critic.optimizer_config.lr=1e-30"]
    assert run(tmp_path, capfd, *settings, *start)[0] == 0
    state = Path("run/checkpoints/global_step_1/policy/critic/policy.safetensors")
    old, new = load_file(tmp_path / "old" / state), load_file(tmp_path / state)
    assert old["lm_head.weight"].abs().min() > 1e-20
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    # Another model would not fit its value head.
    other = "trainer.critic.model.path=" + str(tmp_path / "old" / "run" / "model")
    assert run(tmp_path / "old" / "run", capfd, *settings, *start, other)[0] == 0
    assert load_file(tmp_path / "old" / "run" / state)["lm_head.weight"].abs().max() < 1e-20


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_start_from_a_run_of_another_model_or_from_none_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    code, text = run(tmp_path, capfd, f"trainer.init_from={tmp_path / 'none'}:best", verb=verb)
    assert code == 2 and "none is not a run folder" in text
    RunFolder(tmp_path / "other", RunConfig()).close()
    code, text = run(tmp_path, capfd, f"trainer.init_from={tmp_path / 'other'}", verb=verb)
    assert code == 2 and "that run has another model" in text
    RunFolder(tmp_path / "same", compose(TINY[0], TINY[1:])).close()
    code, text = run(tmp_path, capfd, f"trainer.init_from={tmp_path / 'same'}:7", verb=verb)
    assert code == 2 and "has no checkpoint of step 7 here. Steps: none." in text
    assert not (tmp_path / "run").exists(), "it is free for the corrected command"
    given = [f"trainer.runs_dir={tmp_path / 'runs'}", f"trainer.init_from={tmp_path / 'none'}"]
    assert main([verb, *TINY, *given]) == 2 and not [*tmp_path.glob("runs/*")]


def test_what_cannot_be_exported_is_refused_with_the_steps_that_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints" / "global_step_2").mkdir(parents=True)
    assert main(["export", str(run_folder), str(tmp_path / "new")]) == 2
    (run_folder / "config.yaml").write_text("{}")
    assert main(["export", f"{run_folder}:3", str(tmp_path / "new")]) == 2
    assert main(["export", f"{run_folder}:2", str(tmp_path / "new")]) == 1
    assert main(["export", f"{run_folder}:2", str(tmp_path)]) == 2
    assert main(["eval", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for part in ("not a run folder", "Steps: 2.", "is damaged: manifest.json is missing", "exists already", "--recipe"):
        assert part in told
    assert not (tmp_path / "new").exists()


def test_a_part_of_a_run_is_told_how_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("runs/a-1/checkpoints/global_step_2")
    for folder in (checkpoint, Path("runs/a-1/policy"), checkpoint.with_name("global_step_2_mine1")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    Path("runs/a-1/config.yaml").write_text("{}")
    run = tmp_path / "runs" / "a-1"
    for words, remedy in (
        (["export", str(checkpoint), "new"], "It is a part of the run runs/a-1: name runs/a-1:2."),
        (["export", "runs/a-1/policy", "new"], "It is a part of the run runs/a-1: name runs/a-1."),
        (["eval", str(checkpoint)], "It is a part of the run runs/a-1: name runs/a-1:2."),
        (["train", *TINY, f"trainer.init_from={checkpoint}"], "name runs/a-1:2."),
        (["train", *TINY, f"trainer.run_dir={checkpoint}"], f"trainer.run_dir={run} trainer.resume_step=2."),
        (["train", *TINY, f"trainer.policy.model.path={checkpoint}"], f"`skyrl-train export {run}:2 FOLDER` writes."),
        (["export", "runs/a-1:3", "new"], "Steps: 2."),
    ):
        assert main(words) == 2
        assert remedy in capsys.readouterr().err


def test_an_evaluation_alone_needs_no_schedule_no_adapter_and_no_score_of_the_best_checkpoint() -> None:
    of_the_run = [
        "trainer.mode=sync", "trainer.policy_mini_batch_size=2", "trainer.train_batch_size=6",  # three steps to a sync
        "trainer.eval.num_engines=1", "trainer.eval.best_metric=eval/pass@8", "trainer.policy.model.lora={rank: 4, alpha: 8}",
    ]  # fmt: skip
    config = for_evaluation(compose("quickstart", of_the_run), "some/model")
    found = validate(config)
    assert (found.errors, found.warnings) == ([], [])
    assert len(load_evaluation_prompts(config)) == config.trainer.eval.generate > 0
    with pytest.raises(ConfigError, match="policy_mini_batch_size=0"):
        for_evaluation(compose("quickstart", ["trainer.policy_mini_batch_size=0"]), "some/model")


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_conversations_of_an_evaluation_need_a_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    model, prompts = tmp_path / "model", tmp_path / "held_out.jsonl"
    build_model_folder(BuildModelConfig(hidden_size=32, num_layers=1), model, seed=0)
    (model / "chat_template.jinja").unlink()
    prompts.write_text('{"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "07c="}]}\n')
    settings = ["trainer.eval.interval=1", f"trainer.eval.eval_data=[{prompts}]", "trainer.trackers=[]"]
    settings += ["generator.inference_engine.executor=thread", f"trainer.runs_dir={tmp_path}"]
    words = {
        "train": ["train", "quickstart", f"trainer.policy.model.path={model}"],
        "eval": ["eval", str(model), "--recipe", "quickstart"],
    }
    assert main([*words[verb], *settings]) == 2
    assert "is a conversation of ['system', 'user'], and the tokenizer has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("executor", "transport", "expected"),
    [("process", "cuda_ipc", "shared_memory"), ("ray", "cuda_ipc", "gloo"), ("process", "nccl", "gloo"), ("ray", "disk", "disk")],
)  # fmt: skip
def test_weights_from_the_cpu_reach_engines_on_other_machines_too(executor: str, transport: str, expected: str) -> None:
    settings = [f"generator.inference_engine.executor={executor}", f"generator.weight_transport={transport}"]
    assert without_trainer(compose("quickstart", settings)).generator.weight_transport == expected


def test_without_a_run_dir_a_finished_run_is_followed_by_the_next_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["train", *TINY, f"trainer.runs_dir={tmp_path}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart-1", "quickstart-2"]


@pytest.mark.parametrize(
    ("setting", "overrides", "message"),
    [
        ("generator.name", [], "package.module:Class or file.py:Class"),
        ("environment.env_class", ["data.train_data=[prompts.jsonl]"], "package.module:Class or file.py:Class"),
        ("trainer.fully_async.staleness_policy", [], "package.module:Class or file.py:Class"),
        (
            "trainer.fully_async.staleness_policy",
            ["trainer.mode=partial_rollout"],
            "package.module:Class or file.py:Class",
        ),
        ("rollout.stages.reward.function", [], "package.module:function or file.py:function"),
        ("+generator.kwargs.agent", ["generator.name=harness"], "package.module:function or file.py:function"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_an_import_path_that_leads_nowhere_is_an_error_before_there_is_a_run_folder(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    overrides: list[str],
    message: str,
    verb: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path, '{"prompt": "01a="}\n' * 8)
    Path("mine.py").write_text("")
    assert main([verb, *TINY, *overrides, f"{setting}=mine.py:Nothing"]) == 2
    text = "".join(capfd.readouterr())
    assert f"{setting.lstrip('+')}='mine.py:Nothing' cannot be imported" in text
    assert message in text
    assert not Path("runs").exists()


def test_a_trainer_mode_that_names_no_trainer_is_an_error_before_torch_is_imported(tmp_path: Path) -> None:
    modes = ["nowhere:Trainer", "json:JSONDecoder", "json:loads", "fully_asinc"]
    code = (
        "import sys; from skyrl_train.entrypoints.command_line import main\n"
        f"for mode in {modes}:\n"
        f"    code = main(['plan', 'quickstart', 'trainer.runs_dir={tmp_path}', f'trainer.mode={{mode}}'])\n"
        "    print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"] * len(modes)
    assert all(mode in done.stderr for mode in modes) and done.stderr.count("trainer.mode") >= len(modes)


def test_a_plan_of_the_quickstart_imports_nothing_that_it_does_not_need() -> None:
    heavy = (
        "torch",
        "transformers",
        "ray",
        "datasets",
        "httpx",
        "skyrl_train.inference.client",
        "skyrl_train.entrypoints.run",
    )
    code = (
        "import sys; from skyrl_train.entrypoints.command_line import main\n"
        "for arguments in (['plan', 'quickstart'], ['plan', 'quickstart', 'trainer.algorithm.policy_loss_type=ppo_klip']):\n"
        "    print('exit', main(arguments))\n"
        f"    print('heavy', [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("exit ")] == ["exit 0", "exit 2"]
    assert [line for line in lines if line.startswith("heavy ")] == ["heavy []"] * 2
    assert "S=4" in done.stdout and "ppo_clip" in done.stderr


def test_plan_prints_it_and_touches_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = run(tmp_path, capfd, verb="plan")
    assert code == 0
    assert "D=1" in text
    assert "S=4" in text
    assert not (tmp_path / "run").exists()


def test_plan_prints_the_settings_that_differ_from_their_defaults(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, text = run(tmp_path, capfd, "trainer.seed=7", verb="plan")
    changed = [line.split() for line in text.partition("settings that differ")[2].splitlines()]
    assert ["trainer.seed", "7", "(default", "0)"] in changed
    defaults = [line for line in changed if line and line[0] == "trainer.algorithm.gamma"]
    assert defaults == [], "this one has its default"


def test_plan_prints_prompts_as_the_model_sees_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = run(tmp_path, capfd, "--prompts", "2", verb="plan")
    assert code == 0
    heads = re.findall(r"^prompt (\S+): (\d+) of at most (\d+) tokens\n(.*)", text, re.MULTILINE)
    assert len(heads) == 2
    for _, tokens, limit, shown in heads:
        assert len(shown) == int(tokens) <= int(limit), "a token of this model is a character"


def test_prompts_that_an_agent_writes_are_left_to_try(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent = ("generator.name=harness", "generator.kwargs.agent=tests.cpu.test_entrypoint:run")
    code, text = run(tmp_path, capfd, *agent, "--prompts", "1", verb="plan")
    assert code == 2 and "`skyrl-train try` runs it once" in text


def test_prompts_of_a_stream_are_left_to_try(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "03a=", "environment": {"count": 3, "letter": "a"}}\n' * 8)
    code, text = run(tmp_path, capfd, f"data.train_data=[{rows}]", "data.streaming=true", "--prompts", "1", verb="plan")
    assert code == 2 and "`skyrl-train try` shows one of them" in text


NO_EFFECT = ("trainer.algorithm.gamma=0.9", "trainer.fsdp.num_workers=4", "generator.inference_engine.ray_num_gpus=1")


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_a_setting_without_effect_is_a_warning_and_the_run_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = run(tmp_path, capfd, *NO_EFFECT)
    assert code == 0
    assert (tmp_path / "run" / "policy").is_dir()
    warned = warnings_in(text)
    assert len(warned) == 3 and all(any(key.partition("=")[0] in line for line in warned) for key in NO_EFFECT)
    assert text.index("warning: ") < text.index("Starting: ")


def test_plan_prints_the_warnings_and_strict_makes_them_errors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = run(tmp_path, capfd, *NO_EFFECT, verb="plan")
    assert code == 0 and len(warnings_in(text)) == 3
    code, text = run(tmp_path, capfd, "--strict", *NO_EFFECT, verb="plan")
    assert code == 2 and "3 settings cannot work" in text
    assert run(tmp_path, capfd, "--strict", verb="plan")[0] == 0


def test_a_plan_beyond_this_machines_memory_is_a_warning_and_training_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.entrypoints.inputs.this_machine", lambda gpus: Machine(2**20))
    code, text = run(tmp_path, capfd, verb="plan")
    assert code == 0
    (warning,) = warnings_in(text)
    assert "memory does not suffice: Training on cpu" in warning and "there are 0.0 GiB" in warning
    assert run(tmp_path, capfd, "--strict", verb="plan")[0] == 2
    code, text = run(tmp_path, capfd)
    assert code == 2 and "ConfigError: Training on cpu" in text
    assert not (tmp_path / "run").exists()
