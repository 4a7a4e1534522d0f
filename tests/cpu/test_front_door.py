"""``skyrl_train.train`` and ``load_run``: a script, a thread, a notebook with a real kernel; and wrong arguments."""

from __future__ import annotations

import asyncio
import html
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest
import torch
from forks import ForkedProcess, Forks
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import skyrl_train
from skyrl_train.config.memory import Machine
from skyrl_train.entrypoints.api import write_model, write_rows
from skyrl_train.entrypoints.inputs import load_inputs
from skyrl_train.entrypoints.run import StopRequest
from skyrl_train.entrypoints.run import train as train_inputs
from skyrl_train.errors import ConfigError, GeneratorOutputError, NoSuchRunError
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.process_backend import ProcessBackend

TINY: dict[str, Any] = {
    "trainer": {
        "policy_mini_batch_size": 2,
        "max_steps": 3,
        "trackers": [],
        "policy": {"model": {"build": {"hidden_size": 32}}},
    },
    "generator.n_samples_per_prompt": 2,
    "generator.inference_engine.executor": "thread",
    "data.generate": 8,
}


class Counting(skyrl_train.GymGenerator):
    calls = 0

    async def generate(self, input_batch: skyrl_train.GeneratorInput) -> skyrl_train.GeneratorOutput:
        type(self).calls += 1
        return await super().generate(input_batch)


def train(folder: Path, recipe: Any = "quickstart", **arguments: Any) -> skyrl_train.Run:
    overrides = {**TINY, "trainer.runs_dir": str(folder), **arguments.pop("overrides", {})}
    return skyrl_train.train(recipe, overrides=overrides, quiet=True, **arguments)


def test_a_script_trains_with_classes_and_functions_of_its_own(tmp_path: Path) -> None:
    steps = []

    class Noting(skyrl_train.FullyAsyncTrainer):
        def report(self, trained: Any) -> None:
            super().report(trained)
            steps.append(self.global_step)

    def reward(group: Any) -> list[float]:
        return [float(index) for index, _ in enumerate(group.samples)]

    before = Counting.calls
    run = train(tmp_path, trainer_cls=Noting, generator=Counting, reward_fn=reward)

    assert steps == [1, 2, 3]
    assert Counting.calls - before >= 6
    assert run.finished and run.path == tmp_path / "quickstart-1"
    assert run.metrics.index.tolist() == [1, 2, 3]
    assert run.metrics["reward/mean"].tolist() == [0.5, 0.5, 0.5]
    assert run.samples["reward"].isin([0.0, 1.0]).all()
    assert run.config.trainer.max_steps == 3
    assert run.summary.steps == 3
    assert run.policy is not None and (run.policy / "config.json").is_file()
    assert "finished, 3 steps, reward 0.500 -> 0.500" in repr(run)
    shown = run._repr_html_()
    assert "finished, 3 steps, reward 0.500 -&gt; 0.500" in shown and "reward by step" in shown
    assert all(html.escape(str(line)) in shown for line in run.advice)


ROWS = [{"prompt": f"{count:02d}c=", "answer": "c" * count} for count in range(1, 9)]


def test_rows_train_with_a_reward_function_of_trl(tmp_path: Path) -> None:
    seen = set()

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        seen.update(answer)
        return [float(index) for index, _ in enumerate(completions)]

    overrides = {"trainer.max_steps": 1, "trainer.eval.interval": 1}
    run = train(tmp_path, dataset=ROWS, eval_dataset=ROWS[:2], reward_fn=reward, overrides=overrides)
    assert run.config.environment.env_class == "single_turn"
    assert seen and seen <= {row["answer"] for row in ROWS}
    (path,) = run.config.data.train_data
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS
    assert Path(path).parent == tmp_path / "datasets"
    (eval_path,) = run.config.trainer.eval.eval_data
    assert [json.loads(line) for line in Path(eval_path).read_text().splitlines()] == ROWS[:2]
    assert [path.suffix for path in (tmp_path / "datasets").iterdir()] == [".jsonl", ".jsonl"]


def test_several_reward_functions_are_summed_with_weights_as_in_trl(tmp_path: Path) -> None:
    def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [2.0 for _ in completions]

    def shape(completions: list[str], **_: Any) -> list[float | None]:
        return [None, *(4.0 for _ in completions[1:])]

    run = train(tmp_path, dataset=ROWS, reward_fn=[accuracy, shape], reward_weights=[1.0, 0.5])
    assert run.metrics["reward/mean"].tolist() == [3.0] * 3
    assert run.metrics["environment/accuracy"].tolist() == [2.0] * 3
    assert run.metrics["environment/shape"].tolist() == [4.0] * 3


def tiny_model(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    tokenizer = character_tokenizer("0123456789=c")
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(num_hidden_layers=1, intermediate_size=32, vocab_size=len(tokenizer), **sizes)
    return Qwen3ForCausalLM(config), tokenizer


def test_a_model_may_be_an_object_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(seed=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    overrides = {"trainer.max_steps": 1, "trainer.runs_dir": str(tmp_path), "generator.sampling_params.max_tokens": 4}
    overrides |= {"trainer.policy_mini_batch_size": 2, "generator.inference_engine.executor": "thread"}
    run = skyrl_train.train(
        model=model, tokenizer=tokenizer, dataset=ROWS, reward_fn=length, overrides=overrides, quiet=True
    )
    assert run.config.trainer.mode == "fully_async" and run.path.name == "length-1"
    folder = Path(run.config.trainer.policy.model.path or "")
    assert folder.parent == tmp_path / "models"
    started = Qwen3ForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(started[name], weight) for name, weight in before.items())
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    assert run.policy is not None
    trained = AutoModelForCausalLM.from_pretrained(run.policy)
    # It came from a folder, so it brings its tokenizer.
    again = write_model(trained, None, tmp_path / "models")
    assert (again / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert write_model(*tiny_model(seed=1), tmp_path / "models") == folder != again
    assert sorted((tmp_path / "models").iterdir()) == sorted([folder, again])


class Twice(skyrl_train.Environment):
    """Ends after two turns; its reward is a column of the row."""

    turns = 0

    def step(self, action: str) -> skyrl_train.EnvironmentStep:
        self.turns += 1
        observations = [{"role": "user", "content": "="}]
        return {"observations": observations, "reward": self.extras["worth"], "done": self.turns == 2}


WORTH = [{"prompt": "01c=", "worth": 0.25}]
ONE_STEP = {"trainer.max_steps": 1, "trainer.policy_mini_batch_size": 1, "generator.max_turns": 2}


def test_an_environment_is_a_class_or_a_function_that_returns_one(tmp_path: Path) -> None:
    def make(extras: Any) -> Twice:
        return Twice({"worth": 2 * extras["worth"]})

    for environment, mean in ((Twice, 0.5), (make, 1.0)):
        run = train(tmp_path, dataset=WORTH, environment=environment, overrides=ONE_STEP)
        assert run.metrics["reward/mean"].tolist() == [mean]


def test_a_function_that_returns_no_environment_stops_the_run_at_once(tmp_path: Path) -> None:
    def make(extras: Any) -> Any:
        return extras

    with pytest.raises(
        GeneratorOutputError, match=r"returned \{'worth': 0.25\}, which is no environment: it lacks init"
    ):
        train(tmp_path, dataset=WORTH, environment=make, overrides=ONE_STEP)

    def takes_more(extras: Any, size: int) -> Any: ...

    with pytest.raises(ConfigError, match=r"missing a required argument: 'size'\. Write def make\(extras\)"):
        train(tmp_path, dataset=WORTH, environment=takes_more)


def test_a_function_agent_is_an_argument(tmp_path: Path) -> None:
    from openai import AsyncOpenAI

    async def agent(prompt: Any, base_url: str, api_key: str, extras: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.chat.completions.create(model="policy", messages=prompt)
        return float(extras["worth"])

    run = train(tmp_path, dataset=WORTH, agent=agent, overrides=ONE_STEP)
    assert run.metrics["reward/mean"].tolist() == [0.25]


def test_a_run_without_a_recipe_is_called_after_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solves(completions: list[str], **_: Any) -> list[float]: ...

    async def agent(prompt: Any, base_url: str, api_key: str) -> float: ...

    def name(overrides: Any = (), **given: Any) -> str:
        # Instead of training: the name is in the settings.
        composed = []
        monkeypatch.setattr("skyrl_train.entrypoints.api.load_inputs", lambda config: composed.append(config) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            skyrl_train.train(overrides=[f"trainer.runs_dir={tmp_path}", *overrides], **given)
        return str(composed[0].trainer.run_name)

    assert name(agent=agent, dataset=ROWS) == "agent"
    assert name(environment="skyrl_gym:gsm8k", reward_fn=solves) == "skyrl_gym_gsm8k"
    assert name(dataset=ROWS, reward_fn=[solves]) == "solves"
    assert name(["trainer.run_name=mine"], reward_fn=solves) == "mine"
    assert name(model="Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    assert name() == name(trainer_cls=skyrl_train.PPOTrainer) == "quickstart"
    for file, its_name in (("/somewhere/my task.py", "my_task"), ("/somewhere/tasks/__main__.py", "tasks")):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
        assert name(dataset=ROWS) == its_name


@pytest.mark.parametrize("kind", [datasets.Dataset.from_list, pandas.DataFrame, tuple])
def test_equal_rows_have_one_file_whatever_holds_them(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    rows = [{"prompt": "a", "tries": 3, "scores": [0.5, 1.0]}, {"prompt": "\u00fc\n", "tries": 4, "scores": [0.25]}]
    path = write_rows("dataset", rows, tmp_path)
    assert write_rows("dataset", kind(rows), tmp_path) == path
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows


def test_a_frame_of_arrays_is_written_as_lists(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["a"], "scores": [numpy.array([1, 2])]})
    assert json.loads(write_rows("dataset", frame, tmp_path).read_text()) == {"prompt": "a", "scores": [1, 2]}


def test_a_folder_of_runs_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/datasets cannot be made: .* Correct trainer\.runs_dir"):
        train(tmp_path / "file", dataset=ROWS)


def test_a_configuration_is_as_good_as_a_recipe_and_overrides_still_apply(tmp_path: Path) -> None:
    config = skyrl_train.compose("quickstart", ["trainer.algorithm.eps_clip_high=0.31", "trainer.seed=7"])
    run = train(tmp_path, config, overrides={"trainer.max_steps": 1})
    assert (run.config.trainer.algorithm.eps_clip_high, run.config.trainer.seed) == (0.31, 7)
    assert run.summary.steps == 1


def test_a_coroutine_may_call_it_although_its_event_loop_runs(tmp_path: Path) -> None:
    async def cell() -> skyrl_train.Run:
        return train(tmp_path, overrides={"trainer.max_steps": 1})

    assert asyncio.run(cell()).finished


def test_a_closed_event_loop_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.close()
    try:
        assert train(tmp_path, overrides={"trainer.max_steps": 1}).finished
    finally:
        asyncio.set_event_loop(None)


def test_another_thread_may_call_it_and_a_second_run_meanwhile_is_an_error(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def reward(group: Any) -> list[float]:
        inside.set()
        assert go_on.wait(60)
        return [1.0] * len(group.samples)

    runs: list[skyrl_train.Run] = []
    thread = threading.Thread(target=lambda: runs.append(train(tmp_path / "first", reward_fn=reward)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ConfigError, match="A run is under way in this process"):
        train(tmp_path / "second")
    go_on.set()
    thread.join(60)
    assert runs[0].finished
    assert not (tmp_path / "second").exists()


def test_a_stop_that_is_requested_ends_the_run_with_a_checkpoint_and_the_same_call_continues(tmp_path: Path) -> None:
    from rich.console import Console

    stop = StopRequest()
    overrides = ["trainer.max_steps=400", "trainer.policy_mini_batch_size=2", "trainer.trackers=[]"]
    overrides += ["generator.inference_engine.executor=thread", f"trainer.run_dir={tmp_path / 'run'}"]
    inputs = load_inputs(skyrl_train.compose("quickstart", overrides))
    stop.request()  # before training: it stops at its first opportunity
    result = train_inputs(inputs, Console(quiet=True), stop)
    assert not result.finished and result.summary.steps < 400
    assert (result.path / "checkpoints" / "latest").exists()


def test_a_run_continues_with_the_same_lambda_and_not_with_another(tmp_path: Path) -> None:
    run = train(tmp_path, reward_fn=lambda group: [0.25 for _ in group.samples])
    (run.path / "finished.json").unlink()  # as if it had been stopped
    overrides = {"trainer.run_dir": str(run.path), "trainer.max_steps": 4}
    told = r"has a run with other settings:\n  rollout\.stages\.reward\.function: the code of the lambda is not that"
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, reward_fn=lambda group: [0.5 for _ in group.samples], overrides=overrides)
    again = train(tmp_path, reward_fn=lambda group: [0.25 for _ in group.samples], overrides=overrides)
    assert again.metrics.index.tolist() == [1, 2, 3, 4]


FORKING = "import forks, pytest; forks.Forks().install(pytest.MonkeyPatch())"
NOTEBOOK = [
    """
import skyrl_train
from skyrl_train import FullyAsyncTrainer

class Patient(FullyAsyncTrainer):
    async def next_batch(self):
        batch = await super().next_batch()
        print("step", self.global_step + 1, "takes", len(batch), "groups")
        return batch

run = skyrl_train.train("quickstart", trainer_cls=Patient, overrides=settings, quiet=True)
""",
    "print(run, sorted(run.metrics['policy/lr'].index))",
]


def test_a_notebook_trains_a_subclass_with_one_phase_of_its_own_and_the_notebook_of_the_examples(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one kernel, which is forked from a process that has imported everything, as are its training processes."""
    import nbformat
    from nbclient import NotebookClient

    def fork(command: list[str], env: dict[str, str], **_: Any) -> ForkedProcess:
        process = forks.Popen([sys.executable, *command[1:]], env=env, cwd=tmp_path, start_new_session=True)
        process.stdin = process.stderr = None
        while os.getpgid(process.pid) != process.pid:
            pass  # until it has a session of its own: Jupyter ends all processes of its group
        return process

    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", fork)
    assert len([line for line in NOTEBOOK[0].splitlines() if line.strip()]) <= 10
    settings = {**TINY, "trainer.runs_dir": str(tmp_path)}
    cells = [nbformat.v4.new_code_cell(source) for source in (FORKING, f"settings = {settings!r}", *NOTEBOOK)]
    example = nbformat.read(Path(__file__).parents[2] / "examples" / "async" / "notebook.ipynb", as_version=4)
    shortened = [cell for cell in example.cells if cell.cell_type == "code"]
    shortened[0].source += f"\nsettings |= { ({**settings, 'trainer.max_steps': 1})!r}"
    for cell in shortened:
        cell.source = cell.source.replace('"trainer.max_steps": 30', "")
    notebook = nbformat.v4.new_notebook(cells=cells + shortened)
    NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    assert "reward by step" in shortened[1].outputs[-1].data["text/html"]
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.outputs)
    assert [f"step {step} takes 2 groups" in printed for step in (1, 2, 3)] == [True] * 3
    assert "finished, 3 steps" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": 5}, "train() takes a recipe's name, the path of a yaml file, or a RunConfig"),
        ({"recipe": "quickstrat"}, "Did you mean quickstart?"),
        ({"overrides": {"trainer.max_step": 3}}, "Did you mean trainer.max_steps?"),
        ({"overrides": {"trainer.max_steps": object()}}, "A setting cannot hold"),
        ({"trainer_cls": Counting}, "trainer_cls must be a subclass of PPOTrainer"),
        ({"trainer_cls": "fully_async"}, "trainer_cls must be a subclass of PPOTrainer"),
        ({"generator": int}, "generator must be a subclass of GeneratorInterface"),
        ({"generator": 3}, "generator must be a class, or a function that returns a generator"),
        ({"environment": Twice({})}, "environment must be a class, a function that returns an environment, or a name"),
        ({"environment": int}, "is no environment: it lacks init, step, close, get_metrics"),
        ({"environment": "single_tun"}, "Did you mean single_turn?"),
        ({"agent": Counting}, "agent must be a function such as async def agent(prompt, base_url, api_key)"),
        ({"agent": print, "generator": Counting}, "Give agent or generator, not both"),
        ({"overrides": {"data.train_data": ROWS}}, "In Python, train(dataset=...) takes rows."),
        (
            {"overrides": {"trainer.eval.eval_data": [{"prompt": "a"}]}},
            "In Python, train(eval_dataset=...) takes rows.",
        ),
        ({"reward_fn": [print, "file.py:reward"]}, "reward_fn must be a function"),
        ({"reward_fn": [train, train]}, "test_front_door:train; give each its own"),
        ({"reward_fn": train, "reward_weights": [1.0]}, "reward_weights belong to a list of functions"),
        ({"reward_fn": [train], "reward_weights": [1.0, 2.0]}, "one number for each of the 1 functions"),
        ({"model": 3}, "model must be a folder, a name on the hub, or a model of transformers, got int"),
        ({"model": tiny_model(0)[0]}, "its tokenizer is unknown: give train(tokenizer=...)"),
        ({"model": "folder", "tokenizer": tiny_model(0)[1]}, "a folder has its own"),
        ({"reward_fn": "file.py:reward"}, "file.py:reward is the setting rollout.stages.reward.function"),
        ({"tokenizer": tiny_model(0)[1]}, "tokenizer belongs to a model that is an object"),
        ({"peft_config": None}, "overrides={'trainer.policy.model.lora.rank': ...}"),
        (
            {"dataset": "rows.jsonl"},
            "dataset must be a list of rows, a datasets.Dataset or a pandas.DataFrame, got str",
        ),
        ({"dataset": iter([])}, "Name files, folders or data sets on the hub in data.train_data"),
        ({"dataset": datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS))}, "dataset has several splits: test"),
        ({"dataset": ["01c="]}, "dataset[0] must be a dictionary of columns, got '01c='"),
        ({"dataset": [ROWS[0], {"prompt": object()}]}, "dataset[1] has a value that is not text, a number"),
        ({"dataset": [{"prompt": "\ud800"}]}, "dataset[0] has a value that is not text"),
        ({"eval_dataset": []}, "eval_dataset has no rows"),
        ({"learning_rate": 1e-3}, "overrides={'trainer.policy.optimizer_config.lr': ...}"),
        ({"reward_funcs": len}, "train() has no argument 'reward_funcs'. Did you mean reward_fn?"),
        ({"reward": len}, "train() has no argument 'reward'. Did you mean reward_fn?"),
        ({"enviroment": "gsm8k"}, "Did you mean environment?"),
        ({"mode": "sync"}, "overrides={'trainer.mode': ...}"),
        ({"data": []}, "Did you mean dataset?"),
        ({"colour": "red"}, "train() has no argument 'colour'. Settings are given in overrides."),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        train(tmp_path, **arguments)
    assert message in str(raised.value)


def test_strict_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_effect = {"trainer.fsdp.num_workers": 4, "trainer.max_steps": 1}
    with pytest.raises(ConfigError, match=r"trainer\.fsdp\.num_workers"):
        train(tmp_path, overrides=no_effect, strict=True)
    assert not list(tmp_path.iterdir())
    assert train(tmp_path / "warned", overrides=no_effect).finished
    assert train(tmp_path / "plain", overrides={"trainer.max_steps": 1}, strict=True).finished
    monkeypatch.setattr("skyrl_train.entrypoints.inputs.this_machine", lambda gpus: Machine(2**20))
    with pytest.raises(ConfigError, match="Training on cpu"):
        train(tmp_path / "small", strict=True)


@pytest.mark.parametrize("overrides", ["trainer.max_steps=3", [3]])
def test_overrides_are_a_list_of_strings_or_a_mapping(overrides: str | Sequence[Any]) -> None:
    with pytest.raises(ConfigError, match="verride"):
        skyrl_train.train(overrides=overrides)


@pytest.mark.parametrize(
    "value", ["it's", 'a "b" c', "a,b=c{}[]$", "\\'", "", [1, "x y"], {"a.b": 0.5}, True, None, 1e-7, Path("/a b")]
)
def test_any_value_arrives_as_it_was_given(value: Any) -> None:
    from skyrl_train.entrypoints.api import _as_list

    config = skyrl_train.compose("quickstart", _as_list({"generator": {"kwargs": {"given": value}}}))
    assert config.generator.kwargs["given"] == (str(value) if isinstance(value, Path) else value)


def test_a_folder_without_a_run_is_an_error_that_names_the_runs_in_it(tmp_path: Path) -> None:
    run = train(tmp_path, overrides={"trainer.max_steps": 1})
    assert skyrl_train.load_run(run.path).metrics.index.tolist() == [1]
    with pytest.raises(ConfigError, match="quickstart-1"):
        skyrl_train.load_run(tmp_path)
    with pytest.raises(ConfigError, match="not a run folder"):
        skyrl_train.load_run(tmp_path / "nowhere")
    with pytest.raises(NoSuchRunError, match="takes the folder of a run, got None"):
        skyrl_train.load_run(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_goes_on_after_the_death_of_its_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    update, killed = ProcessBackend.update, []

    def dies_once(self: ProcessBackend, minibatch: Minibatch) -> dict[str, float]:
        if minibatch.step == 2 and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return update(self, minibatch)

    monkeypatch.setattr(ProcessBackend, "update", dies_once)
    changes = {"trainer.executor": "process", "trainer.max_restarts": 1, "trainer.run_dir": str(tmp_path / "run")}
    if streaming:
        prompts = tmp_path / "prompts.jsonl"
        row = {"prompt": "02a=", "answer": "aa"}
        prompts.write_text(8 * (json.dumps(row) + "\n"))
        changes |= {"data.train_data": [str(prompts)], "data.streaming": True}
    run = skyrl_train.train("quickstart", overrides=TINY | changes | {"trainer.ckpt_interval": 1}, quiet=True)
    assert killed
    assert run.metrics.index.tolist() == [1, 2, 3]
    assert sorted(run.metrics["group_indices"].sum()) == list(range(6))
