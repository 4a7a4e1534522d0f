"""The command that generates one group and shows it."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skyrl_train.build import engines
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.try_group import INTERRUPTED, Calls, places_of_user_code, problems, visible
from skyrl_train.environments.base import Environment, EnvironmentStep, PromptRecord
from skyrl_train.errors import EngineDeadError
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample

HERE = __name__
TINY = [
    "quickstart",
    "trainer.policy.model.build.hidden_size=32",
    "trainer.policy.model.build.num_layers=1",
    "data.generate=8",
    "generator.sampling_params.max_tokens=6",
]


class TwoTurns(Environment):
    """Answers the first action with "a", and rewards the second one."""

    is_blocking = False
    alphabet = "a"
    first = True

    def step(self, action: str) -> EnvironmentStep:
        done, self.first = not self.first, False
        return {"observations": [{"role": "user", "content": "aaa"}], "reward": 0.5 * done, "done": done}


class Breaks(Environment):
    """Misses a column of its data."""

    is_blocking = False
    alphabet = "a"

    @classmethod
    def generate_prompts(cls, count: int, seed: int) -> list[PromptRecord]:
        return [PromptRecord(str(n), [{"role": "user", "content": "a"}]) for n in range(count)]

    def step(self, action: str) -> EnvironmentStep:
        return {"observations": [], "reward": float(self.extras["no_such_column"]), "done": True}


class Blocks(Breaks):
    """Stops the event loop until that has been reported."""

    reported = threading.Event()

    def step(self, action: str) -> EnvironmentStep:
        assert self.reported.wait(300)
        return {"observations": [], "reward": 1.0, "done": True}


class Waits(Breaks):
    """Waits in a thread until the run is interrupted."""

    is_blocking = True
    interrupted = threading.Event()

    def step(self, action: str) -> EnvironmentStep:
        assert self.interrupted.wait(300)
        return {"observations": [], "reward": 1.0, "done": True}


def sequence(mask: list[int], rewards: list[float] | None = None, stop_reason: str = "stop") -> RolloutSequence:
    length = len(mask)
    numbers: dict[str, Any] = {"logprobs": [0.0] * length, "versions": [0] * length}
    return RolloutSequence.of_lists(
        [7, 8], range(length), mask, rewards=rewards or [0.0] * length, stop_reason=stop_reason, **numbers
    )


def group(*sequences: RolloutSequence) -> RolloutGroup:
    return RolloutGroup(0, "u", "", tuple(Sample((one,)) for one in sequences), 0)


def test_a_call_that_stops_the_event_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skyrl_train.entrypoints.try_group.BLOCKED_S", 0.05)
    printed = Console.print

    def see(self: Console, *shown: Any, **options: Any) -> None:
        printed(self, *shown, **options)
        if "in step" in str(shown):
            Blocks.reported.set()

    monkeypatch.setattr(Console, "print", see)
    assert main(["try", *TINY, f"environment.env_class={HERE}:Blocks", "--samples=1"]) == 0
    shown = capsys.readouterr().out
    assert "a blocking call has stopped the event loop" in shown and "test_entrypoint_try_group.py" in shown


def test_code_that_waits_is_named_and_ctrl_c_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skyrl_train.entrypoints.try_group.QUIET_S", 0.05)
    monkeypatch.setattr(
        "skyrl_train.entrypoints.try_group.STOP_LIMIT_S", 600.0
    )  # the loop of a busy machine answers late
    printed = Console.print

    def see(self: Console, *shown: Any, **options: Any) -> None:
        printed(self, *shown, **options)
        if "in step, 2 times" in str(shown):  # at first, only one sample may have come there
            if "Interrupted" in str(shown):
                Waits.interrupted.set()
            elif not Waits.interrupted.is_set():
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Console, "print", see)
    assert main(["try", *TINY, f"environment.env_class={HERE}:Waits", "--samples=2"]) == INTERRUPTED
    shown = capsys.readouterr().out
    assert "no group and no step has ended" in shown and "test_entrypoint_try_group.py" in shown
    assert "in step, 2 times" in shown.split("Interrupted.")[1]


async def test_places_of_user_code_are_those_of_tasks_that_wait_below_library_code() -> None:
    started = asyncio.Event()

    async def user() -> None:
        started.set()
        await asyncio.wait_for(asyncio.Event().wait(), None)  # never set

    tasks = [asyncio.create_task(gather_or_cancel([user()])) for _ in range(2)]
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    places = places_of_user_code()
    for task in tasks:
        task.cancel()
    await asyncio.wait([waiting, *tasks])
    assert any(place.endswith("in user, 2 times") for place in places), places


def test_a_group_is_shown_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}=", "answer": f"a{n}", "uid": f"row {n}"} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    mine = [f"environment.env_class={HERE}:TwoTurns", "generator.max_turns=2", "data.train_data=[data.jsonl]"]
    assert main(["try", *TINY, *mine, "--samples=2", "--prompt=1", "--tokens", "data.sampler=sequential"]) == 0
    shown = capsys.readouterr().out
    assert "prompt 'row 1'" in shown and "answer: a1" in shown
    assert "sample 2 of 2: reward 0.5" in shown
    assert "aaa" in shown, "what the environment answered"
    assert shown.count("request: ") == 4, "two turns of two samples"
    assert "log-prob" in shown and "given" in shown
    assert "all samples have the same reward" in shown
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]


def test_code_that_fails_is_shown_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", *TINY, f"environment.env_class={HERE}:Breaks"]) == 1
    shown = capsys.readouterr()
    assert f'{Path(__file__).name}", line ' in shown.out
    assert "KeyError: 'no_such_column'" in shown.out
    assert "sample 1, request: " in shown.out, "what came before"
    assert "The code that failed: " in shown.err and "skyrl-train try" not in shown.err, "which is what was done"
    assert shown.err.startswith("RolloutError: ")


def test_calls_are_shown_in_the_order_of_their_ends_with_the_sample_that_made_them() -> None:
    calls = Calls()
    one = [0, 5, 1.0, 3.0, 0]
    calls.detail(
        "request", "p@0_1", {"prompt_tokens": 3, "segments": [one, one], "stop": "stop", "t_submit": 1.0, "t_end": 3.5}
    )
    calls.detail("tool", "p@0_1", {"names": ["add", "\x1b[2Jsub"], "t0": 3.5, "t1": 4.0})
    calls.detail("environment", "p@0_0", {"name": "gsm8k", "call": "step", "t0": 1.0, "t1": 1.25, "ok": True})
    calls.detail("agent", "p@0_1", {"turns": 1, "t0": 1.0, "t1": 5.0, "ok": True})
    assert calls.lines(1) == [
        "request: 3 prompt tokens, 10 sampled, ended by stop, 2.500 s",
        "tool calls: add, \\x1b[2Jsub, 0.500 s",
    ]
    assert calls.lines()[2] == "sample 1, environment gsm8k: step, 0.250 s"


def test_one_sample_is_enough_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", *TINY, "--samples=1"]) == 0, "although a group of one could not train"
    assert "sample 1 of 1: reward" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--prompt=-1", "--samples=0", "environment.env_class=nothing_like_it"])
def test_wrong_input_is_told_before_anything_starts(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", *TINY, wrong]) == 2
    assert "Traceback" not in capsys.readouterr().out


def test_a_missing_gpu_is_told_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skyrl_train.build.checks.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    engine = "generator.inference_engine"
    assert main(["try", *TINY, f"{engine}.backend=vllm", f"{engine}.device=cuda", f"{engine}.executor=process"]) == 2
    assert f"{engine}.device=cuda with backend=vllm: torch sees 0 GPUs" in capsys.readouterr().err


def test_a_response_is_split_where_the_loss_mask_changes() -> None:
    assert list(sequence([1, 1, 0, 1]).response_runs()) == [(True, [0, 1]), (False, [2]), (True, [3])]
    assert list(sequence([]).response_runs()) == []


def test_what_would_teach_nothing_is_said() -> None:
    good, bad = sequence([1], [1.0]), sequence([1], [0.0])
    assert problems(group(good, bad)) == []
    assert len(problems(group(good))) == 0, "one sample is always equal to itself"
    assert "same reward" in problems(group(bad, bad))[0]
    assert "no token" in problems(group(sequence([0], [1.0]), sequence([], [])))[0]
    assert "1 of 2 responses" in problems(group(good, sequence([1], [0.0], "length")))[0]


def test_episodes_that_the_turn_limit_ends_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1="}\n')
    mine = [f"environment.env_class={HERE}:TwoTurns", f"data.train_data=[{data}]"]
    assert main(["try", *TINY, *mine, "--samples=2"]) == 0
    assert (
        "2 of 2 episodes ended before their environment was done. Raise generator.max_turns" in capsys.readouterr().out
    )


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert visible("a\n\tä") == "a\n\tä"
    assert visible("\x1b[2J\x07\u202e") == "\\x1b[2J\\x07\\u202e"


def test_the_output_of_an_engine_is_shown_only_if_the_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build, fails = engines.build_engine, False

    def build_engine(config: Any, plan: Any, model_path: str, index: int, worker: Any, logs: Path, *others: Any) -> Any:
        (log := logs / f"engine-{index}.log").write_text("much to say\n")
        if fails:
            raise EngineDeadError(f"It did not start. Its own messages are in {log}.")
        return build(config, plan, model_path, index, worker, logs, *others)

    monkeypatch.setattr(engines, "build_engine", build_engine)
    assert main(["try", *TINY, "--samples", "2"]) == 0
    assert "much to say" not in capsys.readouterr().out
    fails = True
    assert main(["try", *TINY]) == 1
    told = capsys.readouterr()
    assert "much to say" in told.out and "Its own messages are above." in told.err
