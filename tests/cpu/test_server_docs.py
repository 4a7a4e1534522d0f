"""The pages about the endpoint: the tables of the reference have every field, and the commands of the guide run."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from endpoint_worlds import ADMIN_KEY
from forks import Forks

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.endpoint.dialects import anthropic, generate, responses
from skyrl_train.entrypoints import serve
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.openai import chat as openai_chat
from skyrl_train.inference.openai import completions as openai_completions
from skyrl_train.inference.openai.body import field_table
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.runtime.process import DaemonThreadPool

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "http_endpoint.md").read_text()
REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
BODIES = {
    "/v1/chat/completions": openai_chat.ChatCompletionBody,
    "/v1/completions": openai_completions.CompletionBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": anthropic.MessagesBody,
    "/inference/v1/generate": generate.GenerateBody,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("route", BODIES)
def test_every_request_field_is_in_the_table_of_its_route_or_in_a_shared_one(route: str) -> None:
    def fields(heading: str) -> list[tuple[str, ...]]:
        section = REFERENCE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        return re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (.*) \|$", section, re.MULTILINE)

    listed = fields(f"POST {route}")
    expected = field_table(BODIES[route])
    if route == "/inference/v1/generate":  # has the fields of its sampling parameters in a second table
        listed += fields("Sampling fields")
        expected += field_table(generate.GenerateSampling)
    else:
        listed += fields("Sampling fields") + fields("Fields of vLLM's server")
    assert sorted(listed) == sorted((row.name, str(row.support), row.note) for row in expected)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[str]:
    """The command of the page, with a model made on the spot and a free port; ends as Ctrl-C ends it."""
    model = tmp_path_factory.mktemp("served") / "policy"
    build_model_folder(BuildModelConfig(alphabet="0123456789+=", hidden_size=32), model, seed=0)
    [command] = re.findall(r"skyrl-train serve (.*)", blocks("bash")[0])
    words = command.replace("runs/quickstart-1/policy", str(model)).replace("--port 8000", "--port 0").split()
    server = forks.Popen(
        [sys.executable, "-m", "skyrl_train", "serve", *words],
        env={**os.environ, serve.KEY_VARIABLE: ADMIN_KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        lines = [server.stdout.readline() for _ in range(7)]
        parts = [line.partition(":")[0].strip() for line in lines[:-1]]
        assert parts == ["Starting", "libraries", "tokenizer", "engines", "model", "first weight sync"]
        line = lines[-1]
        assert line.startswith(f"serving {model} at http://127.0.0.1:"), line
        yield line.split()[-1].removesuffix("/v1")
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert ADMIN_KEY not in server.stdout.read()
    finally:
        server.kill()
        server.wait()


def test_the_program_of_the_page_runs(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv(serve.KEY_VARIABLE, ADMIN_KEY)
    [program] = [block for block in blocks("python") if "OpenAI(" in block]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(program.replace("http://127.0.0.1:8000", base), "http_endpoint.md", "exec"), {})
    assert re.search(r"\[\d+, ", shown.getvalue()), "the token ids"


def test_the_commands_of_the_page_run(base: str, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None or "--json" not in subprocess.run([curl, "--help", "all"], capture_output=True, text=True).stdout:
        pytest.skip("no curl that knows --json")
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("curl ")]
    assert len(lines) >= 8
    environment = {**os.environ, "BASE": base, serve.KEY_VARIABLE: ADMIN_KEY, "ADMIN_KEY": ADMIN_KEY}
    opened = subprocess.run(
        [curl, "-s", f"{base}/v1/sessions", "-H", f"Authorization: Bearer {ADMIN_KEY}", "--json", "{}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r'"id":"([^"]+)".*"api_key":"([^"]+)"', opened)
    assert found is not None
    environment.update(ID=found[1], KEY=found[2])
    ask = '{"model": "policy", "prompt": "1+2=", "max_tokens": 2}'
    said = f"curl -s {base}/v1/completions -H \"Authorization: Bearer {found[2]}\" --json '{ask}'"
    for line in [said, *lines]:
        command = line.split("  #")[0].replace("curl -s", "curl -s -w '\\n%{http_code}'")
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] in ("200", "201"), f"{line}\n{done.stdout}"


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (["nowhere"], None, "SKYRL_ADMIN_KEY"),
        (["nowhere", "--host", "0.0.0.0", "--open"], None, "without keys"),
        (["./nowhere", "--open"], None, "'./nowhere' is not there. Point MODEL at"),
        (["x"], "short", "16 characters"),
    ],
)
def test_a_wrong_command_is_reported_and_exits_with_2(
    words: list[str], key: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(serve.KEY_VARIABLE, key)
    assert main(["serve", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_gpu_is_told_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_model_folder(BuildModelConfig(hidden_size=32), tmp_path / "model", seed=0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["serve", str(tmp_path / "model"), "--open", "--port", "0", "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ConfigError: device 'cuda' is not there: torch sees 0 GPUs.")
    assert "engines:" not in captured.out


def test_each_vllm_has_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model_folder(BuildModelConfig(hidden_size=32), tmp_path / "model", seed=0)
    devices: list[Any] = []

    def last_engine(factory: str, arguments: Mapping[str, Any]) -> None:
        devices.append(arguments["devices"])
        if len(devices) == 2:
            raise ConfigError("no third engine is asked for")

    monkeypatch.setattr("skyrl_train.inference.engines.proxy.ProcessEngine", last_engine)
    words = ["serve", str(tmp_path / "model"), "--open", "--port", "0", "--backend", "vllm", "--num-engines", "2"]
    for gpus, expected in ((2, [[0], [1]]), (0, [None, None])):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        devices.clear()
        assert main(words) == 2 and devices == expected


def test_a_signal_ends_a_server_whose_model_is_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, over, waited_for = str(tmp_path / "model"), threading.Event(), list[object]()
    build_model_folder(BuildModelConfig(hidden_size=32, num_layers=1), Path(folder), seed=0)

    def loads(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(60):  # a server that waits for it
            waited_for.append(arguments)

    monkeypatch.setattr("skyrl_train.models.folder.load_model", loads)
    monkeypatch.setattr(serve, "_engines", lambda *arguments: [EmbeddedEngine(folder, executor="thread")])
    monkeypatch.setattr(
        "skyrl_train.runtime.process.DaemonThreadPool", functools.partial(DaemonThreadPool, shutdown_limit_s=0.0)
    )
    assert main(["serve", folder, "--open", "--port", "0"]) == 0 and not waited_for
    over.set()
