"""Agents as functions and as programs: their arguments, their results and errors, and their clean-up."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import sys
import threading
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.config.schema import InferenceEngineConfig
from skyrl_train.entrypoints import serve
from skyrl_train.errors import ConfigError
from skyrl_train.generators.harness import agent as agents
from skyrl_train.generators.harness import process
from skyrl_train.generators.harness.agent import AgentError, AgentResult, AgentTask, FunctionAgent, to_result
from skyrl_train.generators.harness.process import ProcessAgent
from skyrl_train.inference.engines.vllm import remote_server

KEY = "sk-very-secret"


def task(**changes: Any) -> AgentTask:
    values: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "go"}],
        "extras": {"answer": "7"},
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": KEY,
        "session_id": "session-1",
        "seed": 5,
    }
    return AgentTask(**{**values, **changes})


def program(source: str, **options: Any) -> ProcessAgent:
    return ProcessAgent([sys.executable, "-c", source], **options)


class TestResults:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (1, AgentResult(1.0)),
            (True, AgentResult(1.0)),
            ({"reward": 0.5}, AgentResult(0.5)),
            ({"turn_rewards": [1, 0]}, AgentResult(None, [1.0, 0.0])),
            ({"reward": 0, "metrics": {"solved": True}}, AgentResult(0.0, metrics={"solved": 1.0})),
            (None, AgentResult()),
            (np.bool_(True), AgentResult(1.0)),
            (torch.tensor([0.5]), AgentResult(0.5)),
            ({"turn_rewards": np.array([1.0, 0.0])}, AgentResult(None, [1.0, 0.0])),
            (
                {"reward": np.float32(0.5), "metrics": {"solved": np.bool_(True)}},
                AgentResult(0.5, metrics={"solved": 1.0}),
            ),
        ],
    )
    def test_a_valid_result_is_converted(self, value: Any, expected: AgentResult) -> None:
        result = to_result(value)
        assert (result.reward, list(result.turn_rewards), dict(result.metrics)) == (
            expected.reward,
            list(expected.turn_rewards),
            dict(expected.metrics),
        )

    @pytest.mark.parametrize(
        "value",
        [
            *(
                "1.0",
                float("nan"),
                [1.0],
                {"score": 1},
                {"reward": "x"},
                {"turn_rewards": 1},
                {"metrics": [1]},
                object(),
            ),
            *(10**400, np.ones(2), torch.ones(2), {"turn_rewards": np.float32(1)}, {"turn_rewards": "10"}),
        ],
    )
    def test_an_invalid_result_is_rejected(self, value: Any) -> None:
        with pytest.raises(AgentError, match=r"Return a number, or \{"):
            to_result(value)


def parts(text: str, size: int = 8) -> set[str]:
    return {text[place : place + size] for place in range(len(text) - size + 1)}


@given(st.lists(st.tuples(st.text(), st.integers(0, 14), st.integers(0, 14)), max_size=6), st.text())
def test_redacting_leaves_all_but_the_parts_of_the_key(pieces: list[tuple[str, int, int]], end: str) -> None:
    text = "".join(between + KEY[first:last] for between, first, last in pieces) + end
    redacted = task().redact(text)
    assert not parts(KEY) & parts(redacted)
    if not parts(KEY) & parts(text):
        assert redacted == text


def test_redacting_keeps_what_stands_around_the_key() -> None:
    text = f"a{KEY}b{KEY[:9]}c, {KEY[:7]}, {KEY[5:]}"
    assert task().redact(text) == f"a<api key>b<api key>c, {KEY[:7]}, <api key>"


class TestFunctions:
    async def test_an_async_one_gets_the_arguments_that_it_names(self) -> None:
        async def run(prompt: Any, base_url: str, api_key: str) -> float:
            assert (prompt[0]["content"], base_url, api_key) == ("go", "http://127.0.0.1:9/v1", KEY)
            return 0.5

        assert (await FunctionAgent(run, "run").run(task())).reward == 0.5

    async def test_further_arguments_are_offered_by_name(self) -> None:
        def run(*, extras: Any, seed: int, session_id: str, retries: int = 3) -> dict[str, Any]:
            return {"reward": float(extras["answer"]), "metrics": {"seed": seed, "retries": retries}}

        result = await FunctionAgent(run, "run").run(task())
        assert (result.reward, result.metrics) == (7.0, {"seed": 5.0, "retries": 3.0})

    async def test_a_sync_one_runs_in_a_thread_without_blocking_the_loop(self) -> None:
        entered, leave = threading.Event(), threading.Event()

        def run() -> float:
            entered.set()
            assert threading.current_thread() is not threading.main_thread()
            assert leave.wait(300)
            return 1.0

        running = asyncio.create_task(FunctionAgent(run, "run").run(task()))
        await asyncio.to_thread(entered.wait, 300)
        leave.set()
        assert (await running).reward == 1.0

    @pytest.mark.parametrize("sync", [False, True])
    async def test_one_that_ends_the_interpreter_only_ends_itself(self, sync: bool) -> None:
        def leave() -> float:
            sys.exit(3)

        async def leave_async() -> float:
            sys.exit(3)

        with pytest.raises(AgentError, match="ended itself"):
            await FunctionAgent(leave if sync else leave_async, "leave").run(task())

    async def test_a_sync_one_that_runs_out_of_an_iterator_is_not_waited_for(self) -> None:
        def play() -> float:
            return next(iter(()))

        async with asyncio.timeout(300):
            with pytest.raises(AgentError, match="StopIteration"):
                await FunctionAgent(play, "play").run(task())

    def test_one_with_an_unknown_argument_is_rejected_at_once(self) -> None:
        with pytest.raises(ConfigError, match="asks for 'model'"):
            FunctionAgent(lambda prompt, model: 1.0, "file.py:run")
        with pytest.raises(ConfigError, match="is a str, not a function"):
            FunctionAgent("run", "file.py:run")  # type: ignore[arg-type]


class TestPrograms:
    async def test_one_finds_its_task_the_endpoint_and_its_key(self) -> None:
        agent = program(
            "import json, os, sys\n"
            "task = json.load(open(os.environ['SKYRL_PROMPT']))\n"
            "assert task == json.load(sys.stdin) == {'prompt': [{'role': 'user', 'content': 'go'}],\n"
            "    'extras': {'answer': '7'}, 'session_id': 'session-1', 'seed': 5}, task\n"
            "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'ANTHROPIC_API_KEY']\n"
            "names += ['SKYRL_SESSION_ID', 'MORE']\n"
            "assert [os.environ[name] for name in names] == ['http://127.0.0.1:9/v1', 'sk-very-secret',\n"
            "    'http://127.0.0.1:9', 'sk-very-secret', 'session-1', 'x']\n"
            "assert '127.0.0.1' in os.environ['NO_PROXY'].split(',')\n"
            "print('thinking'); print(json.dumps({'reward': 1.0, 'metrics': {'solved': 1}}))",
            environment={"MORE": "x"},
        )
        result = await agent.run(task())
        assert (result.reward, result.metrics) == (1.0, {"solved": 1.0})

    async def test_values_that_json_lacks_are_passed_as_text_or_null(self) -> None:
        row = {"when": datetime(2026, 5, 4), "image": b"\x00\xff", "price": Decimal("1.50"), "scores": np.arange(2)}
        row["missing"] = [math.nan, {"limit": math.inf}, np.array([math.nan])]
        told = {"when": "2026-05-04T00:00:00", "image": "AP8=", "price": "1.50", "scores": [0, 1]}
        told["missing"] = [None, {"limit": None}, [None]]
        agent = program(f"import json, sys; assert json.load(sys.stdin)['extras'] == {told}; print(1.0)")
        assert (await agent.run(task(extras=row))).reward == 1.0

    @pytest.mark.parametrize(("printed", "remark"), [("", "printed nothing"), ("done.", "is not JSON: 'done.'")])
    async def test_one_need_not_print_a_reward(self, printed: str, remark: str) -> None:
        result = await program(f"print({printed!r})").run(task())
        assert result.reward is None and remark in result.remark

    async def test_no_part_of_its_key_is_quoted_wherever_it_was_cut(self) -> None:
        secret = "sk-" + "".join(random.Random(1).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=43))
        source = "import os; print('v' * {} + os.environ['OPENAI_API_KEY'])"
        for before in (0, 154, 188):
            remark = (await program(source.format(before)).run(task(api_key=secret))).remark
            assert not parts(secret) & parts(remark)
        flood = "import os, sys; print(os.environ['OPENAI_API_KEY'] + 'v' * (65536 - 21)); sys.exit(1)"
        with pytest.raises(AgentError) as info:
            await program(flood).run(task(api_key=secret))
        assert not parts(secret) & parts(str(info.value))

    async def test_server_keys_are_not_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SKYRL_ADMIN_KEY", "VLLM_API_KEY", "OUR_SERVERS_KEY"):
            monkeypatch.setenv(name, f"secret of {name}")
        monkeypatch.setenv("A_COPY", "secret of VLLM_API_KEY")
        monkeypatch.setenv("ADMIN", "of-the-house")
        monkeypatch.setenv("THEIRS", "kept")
        agent = program(
            "import os\nnames = ['SKYRL_ADMIN_KEY', 'VLLM_API_KEY', 'OUR_SERVERS_KEY', 'A_COPY', 'ADMIN', 'THEIRS']\n"
            "print(*[os.environ.get(name) for name in names])",
            withheld=["OUR_SERVERS_KEY"],
            secrets=["of-the-house"],
        )
        assert "None None None None None kept" in (await agent.run(task())).remark

    def test_the_withheld_names_are_those_that_the_library_reads(self) -> None:
        assert {serve.KEY_VARIABLE, remote_server.KEY_VARIABLE, InferenceEngineConfig().remote_api_key_variable} == set(
            process._WITHHELD
        )

    async def test_one_that_fails_is_quoted_by_its_last_lines(self) -> None:
        reason = r"exited with status 1: ValueError: no luck\nBefore that it printed:\n(.|\n)*Traceback"
        with pytest.raises(AgentError, match=reason) as info:
            await program("import sys; print('x\\n' * 99, file=sys.stderr); raise ValueError('no luck')").run(task())
        assert str(info.value).count("\n") <= 8
        assert info.value.output.count("x\n") == 99, "the whole output goes to a file"
        with pytest.raises(AgentError, match=r"was ended by signal 9: no output$"):
            await program("import os; os.kill(os.getpid(), 9)").run(task())

    async def test_one_that_does_not_exist_says_so(self) -> None:
        with pytest.raises(AgentError, match="no-such-program cannot be started: No such file"):
            await ProcessAgent(["no-such-program"]).run(task())
        with pytest.raises(
            AgentError, match=r"no\.py cannot be started: No such file or directory\. Write \{python\} before it"
        ):
            await ProcessAgent(["no.py"]).run(task())

    async def test_a_flood_of_output_neither_stops_it_nor_is_kept(self) -> None:
        result = await program(
            "print('y' * 99 + '\\n' * 1, end='', flush=True)\n" * 3 + "print('z' * (1 << 22)); print(2)"
        ).run(task())
        assert result.reward == 2.0

    @pytest.mark.parametrize("how", ["cancelled", "ended", "deaf"])
    async def test_nothing_is_left_of_its_process_group(self, tmp_path: Path, how: str) -> None:
        """The program starts a child that outlives it, unless it is ended with its group."""
        os.mkfifo(tmp_path / "pid")
        child = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); time.sleep(600)"
        parent = (
            "import json, os, signal, subprocess, sys, time\n"
            + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if how == "deaf" else "")
            + f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(json.dumps([os.getpid(), child.pid]))\n"
            + ("print(1.0)\n" if how == "ended" else "time.sleep(600)\n")
        )
        running = asyncio.create_task(program(parent, grace_s=0.1).run(task()))
        pids = json.loads(await asyncio.to_thread((tmp_path / "pid").read_text))
        if how == "ended":
            assert (await running).reward == 1.0
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        for pid in pids:
            await gone(pid)

    def test_a_command_that_is_no_list_is_rejected(self) -> None:
        for command in ([], "python agent.py"):
            with pytest.raises(ConfigError, match="must be a list"):
                ProcessAgent(command)


async def gone(pid: int) -> None:
    """Returns when a process has ended (a zombie that nobody here can reap has)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(300):
            await ended.wait()
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"process {pid} was left behind") from None
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def test_a_hook_that_does_not_end_is_given_up_and_one_that_comes_too_late_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "_CLOSE_S", 0)
    on_close, closed = agents.CloseHooks(), []
    on_close(closed.append, "other")
    on_close(asyncio.Event().wait)
    [error] = await on_close.close()
    assert "took longer than 0 s" in str(error) and closed == ["other"]
    with pytest.raises(RuntimeError, match="too late"):
        on_close(asyncio.Event().wait)
