"""``skyrl-train init``: a folder with a recipe, code and a test for the user's data, which run unchanged."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from skyrl_train.errors import ConfigError, DataError

LOOKED_AT = 1000  # rows, for the columns and the characters
SHOWN = 100  # characters of a value, where it asks for columns
ANSWER_COLUMNS = ("answer", "solution", "target", "ground_truth", "output", "label")

ENVIRONMENT = '''"""The environment: it rewards answers."""

from skyrl_train import Environment, EnvironmentStep


class Task(Environment):
    is_blocking = False  # True for steps that take time: each episode then runs in a thread

    def step(self, action: str) -> EnvironmentStep:
        """Return the reward of the model's text. ``self.extras`` has the other columns of the data row."""
        expected = str(self.extras[{answer}])
        # The share of right characters, from which random weights can learn; for a real model: float(action == expected).
        reward = sum(a == b for a, b in zip(action, expected, strict=False)) / max(len(action), len(expected), 1)
        return {{"observations": [], "reward": reward, "done": True}}
'''

TEST_ENVIRONMENT = '''"""The environment with answers of a scripted model, and one group of the real one."""

from pathlib import Path

from task import Task

from skyrl_train.entrypoints.command_line import main

ROW = {row}


def test_the_right_answer_is_rewarded_and_none_is_not():
    assert Task(ROW).step(str(ROW[{answer}]))["reward"] == 1.0
    assert Task(ROW).step("")["reward"] == 0.0
'''

REWARD = '''"""The reward of each sample. The environment single_turn ends each episode after one answer."""


def reward(group):
    """Return one number per sample. ``group.env_extras`` has the other columns of the data row."""
    expected = str(group.env_extras[{answer}])
    # The share of right characters, from which random weights can learn; for a real model: float(sample.text == expected).
    return [
        sum(a == b for a, b in zip(sample.text, expected, strict=False)) / max(len(sample.text), len(expected), 1)
        for sample in group.samples
    ]
'''

TEST_REWARD = '''"""The reward of a scripted model's answers, and one group of the real one."""

from pathlib import Path
from types import SimpleNamespace

from task import reward

from skyrl_train.entrypoints.command_line import main

ROW = {row}


def test_the_right_answer_is_rewarded_and_none_is_not():
    samples = [SimpleNamespace(text=text) for text in (str(ROW[{answer}]), "")]
    assert reward(SimpleNamespace(env_extras=ROW, samples=samples)) == [1.0, 0.0]
'''

AGENT = '''"""The agent: it calls the model, and returns its reward."""

import httpx

HTTP = httpx.AsyncClient(timeout=600)  # shared by all runs


async def run(prompt, base_url, api_key, extras):
    """``extras`` has the other columns of the data row."""
    response = await HTTP.post(
        f"{{base_url}}/chat/completions",
        json={{"model": "policy", "messages": prompt}},
        headers={{"Authorization": f"Bearer {{api_key}}"}},
    )
    response.raise_for_status()
    answer = response.json()["choices"][0]["message"]["content"] or ""
    expected = str(extras[{answer}])
    # The share of right characters, from which random weights can learn; for a real model: float(answer == expected).
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected), 1)
'''

PROGRAM = '''"""The agent: a program that calls the model, and prints its reward."""

import json
import os
import sys

import httpx

task = json.load(sys.stdin)
response = httpx.post(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json={{"model": "policy", "messages": task["prompt"]}},
    headers={{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
    timeout=600,
)
response.raise_for_status()
answer = response.json()["choices"][0]["message"]["content"] or ""
expected = str(task["extras"][{answer}])
# The share of right characters, from which random weights can learn; for a real model: float(answer == expected).
reward = sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected), 1)
print(json.dumps({{"reward": reward}}))
'''

SCRIPTED_SERVER = '''

class Scripted(BaseHTTPRequestHandler):
    """A model that always answers ``text``."""

    text = ""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({{"choices": [{{"message": {{"role": "assistant", "content": self.text}}}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{{server.server_port}}/v1"
        server.shutdown()
'''

TEST_AGENT = (
    '''"""The agent against a scripted model, and one group of the real one."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from task import run

from skyrl_train.entrypoints.command_line import main

ROW = {row}
'''
    + SCRIPTED_SERVER
    + """

def test_the_right_answer_is_rewarded_and_none_is_not(url):
    async def both():
        Scripted.text = str(ROW[{answer}])
        right = await run([{{"role": "user", "content": "?"}}], url, "key", ROW)
        Scripted.text = ""
        return right, await run([{{"role": "user", "content": "?"}}], url, "key", ROW)

    assert asyncio.run(both()) == (1.0, 0.0)
"""
)

TEST_PROGRAM = (
    '''"""The program against a scripted model, and one group of the real one."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from skyrl_train.entrypoints.command_line import main

ROW = {row}
'''
    + SCRIPTED_SERVER
    + """

@pytest.mark.parametrize(("text", "reward"), [(str(ROW[{answer}]), 1.0), ("", 0.0)])
def test_the_right_answer_is_rewarded_and_none_is_not(url, text, reward):
    Scripted.text = text
    task = json.dumps({{"prompt": [{{"role": "user", "content": "?"}}], "extras": ROW}})
    environment = {{**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key"}}
    done = subprocess.run(
        [sys.executable, "task.py"], input=task, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {{"reward": reward}}
"""
)

TEST_GROUP = """

def test_one_group_of_the_real_model_is_generated_and_judged(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["try", "recipe.yaml", "--samples", "2"]) == 0
"""

FILES = {
    "env": (ENVIRONMENT, TEST_ENVIRONMENT),
    "reward": (REWARD, TEST_REWARD),
    "agent": (AGENT, TEST_AGENT),
    "program": (PROGRAM, TEST_PROGRAM),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"environment": {"env_class": "task.py:Task"}},
    "reward": {
        "environment": {"env_class": "single_turn"},
        "rollout": {"stages": {"reward": {"function": "task.py:reward"}}},
    },
    "agent": {"generator": {"name": "harness", "kwargs": {"agent": "task.py:run"}}},
    "program": {"generator": {"name": "harness", "kwargs": {"command": ["{python}", "task.py"]}}},
}


def init(
    name: Annotated[Path, typer.Argument(help="The new folder; its last part becomes the name of the runs.")],
    data: Annotated[str, typer.Option(help="Prompts: .jsonl, .csv, .parquet, a folder of data, or a name on the hub.")],
    kind: Annotated[
        Literal["env", "reward", "agent", "program"], typer.Option(help="The kind of code that judges the answers.")
    ] = "env",
    prompt: Annotated[str | None, typer.Option(help="The column of prompts; default: by its name.")] = None,
    answer: Annotated[str | None, typer.Option(help="The column of right answers; default: by its name.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or hub name; default: a small new one.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; a column that has no usual name is then an error.")
    ] = False,
) -> int:
    """Write a recipe, code and a test for your data. They run unchanged; edit them as you like.

    In a terminal, it asks for the columns that it does not recognise by their names.
    """
    from rich.console import Console

    from skyrl_train.config.keys import nearest
    from skyrl_train.rollout.data.dataset import PROMPT_COLUMNS, open_rows

    try:
        rows = [row.value for row in itertools.islice(open_rows(data).rows(), LOOKED_AT)]
    except DataError as error:  # it names the setting of a recipe, and here is none yet
        raise DataError(str(error).replace("data.train_data", "--data")) from error
    if not rows:
        raise ConfigError(f"{data} has no rows.")
    if not isinstance(rows[0], dict):
        raise ConfigError(f"The first row of {data} must be an object with columns, got {rows[0]!r:.100}.")
    columns = [str(column) for column in rows[0]]
    for option, column in (("--prompt", prompt), ("--answer", answer)):
        if column is not None and column not in columns:
            close = nearest(column, columns)
            guess = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"{option} {column!r} is no column of {data}.{guess} Columns: {', '.join(columns)}.")
    usual = {column.lower(): column for column in columns}
    prompt = prompt or next((usual[name] for name in PROMPT_COLUMNS if name in usual), None)
    answer = answer or next((usual[name] for name in ANSWER_COLUMNS if name in usual and usual[name] != prompt), None)
    if None in (prompt, answer) and not yes and os.isatty(0) and os.isatty(1):
        prompt, answer = ask_for_columns(
            data, {str(column): value for column, value in rows[0].items()}, prompt, answer
        )
    missing = [option for option, column in (("--prompt", prompt), ("--answer", answer)) if column is None]
    if missing == ["--answer"] and columns == [prompt]:
        raise ConfigError(
            f"{data} has only prompts, in {prompt!r}. The code that init writes compares responses with right answers: add a "
            "column of them. Without answers, begin with the files in docs/tutorials/your_own_task.md."
        )
    if missing:
        raise ConfigError(
            f"{data} has the columns {', '.join(columns)}. Name one of them with {' and one with '.join(missing)}."
        )
    assert prompt is not None and answer is not None
    if name.exists() and not (name.is_dir() and not any(name.iterdir())):
        raise ConfigError(f"{name} exists already. Name a new folder.")
    asked = [text_of(row.get(prompt)) for row in rows]
    answers = [str(row.get(answer)) for row in rows]
    length = max(map(len, answers))
    here = Path(data.partition(":")[0]).exists()  # otherwise a name on the hub
    settings: dict[str, Any] = {
        "defaults": ["base", "_self_"],
        "trainer": {
            "mode": "fully_async",
            "run_name": name.resolve().name,
            "max_steps": 200,
            "policy_mini_batch_size": 16,
        },
        "generator": {"n_samples_per_prompt": 8},
        "data": {"train_data": [os.path.relpath(data, name) if here else data], "prompt_key": prompt},
    }
    if model is None:
        # Its tokenizer knows single characters, so lengths in tokens are lengths of texts; the template adds some.
        characters = {character for text in (*asked, *answers) for character in text}
        alphabet = "".join(
            sorted(characters, key=lambda character: (character == "$", character))
        )  # "${" would interpolate
        context = 2 ** math.ceil(math.log2(2 * (max(map(len, asked)) + length) + 64))
        build = {"alphabet": alphabet, "max_position_embeddings": context}
        rate = {"lr": 1e-3, "scheduler": "linear", "num_warmup_steps": 10}
        settings["trainer"]["policy"] = {"model": {"build": build}, "optimizer_config": rate}
        settings["generator"] |= {"max_input_length": context // 2, "sampling_params": {"max_tokens": length + 2}}
    else:
        path = os.path.relpath(model, name) if Path(model).is_dir() else model
        settings["trainer"]["policy"] = {"model": {"path": path}, "optimizer_config": {"lr": 1e-6}}
        settings["generator"] |= {"max_input_length": 1024, "sampling_params": {"max_tokens": 1024}}
    for section, values in SETTINGS[kind].items():
        settings[section] = settings.get(section, {}) | values
    code, test = FILES[kind]
    column, right = (json.dumps(text, ensure_ascii=False) for text in (answer, answers[0]))
    written = {
        "recipe.yaml": yaml_of(settings),
        "task.py": code.format(answer=column),
        "test_task.py": (test + TEST_GROUP).format(answer=column, row=f"{{{column}: {right}}}"),
    }
    name.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (name / file).write_text(text, encoding="utf-8")
    console = Console()
    launcher, test_launcher = "", ""
    if given := os.environ.get("SKYRL_TRAIN_LAUNCHER"):  # set by ./uvw
        launcher = f"{shlex.quote(os.path.relpath(given, name))} run "
        test_launcher = f"{launcher}--with pytest "
    lines = [
        f"{name}: {', '.join(written)}; prompts in {prompt!r}, right answers in {answer!r}",
        f"cd {shlex.quote(str(name))}",
        f"{launcher}skyrl-train try recipe.yaml      # one group, shown; nothing is trained",
        f"{test_launcher}pytest test_task.py",
        f"{launcher}skyrl-train train recipe.yaml",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 0


def ask_for_columns(
    data: str, row: dict[str, Any], prompt: str | None, answer: str | None
) -> tuple[str | None, str | None]:
    """Show the first row of the data, and ask for the column that is None. Returns both columns."""
    from rich.console import Console
    from rich.prompt import Prompt
    from rich.table import Table
    from rich.text import Text

    from skyrl_train.observability.screen import visible

    table = Table("column", f"first row of {visible(data)}", box=None, pad_edge=False)
    for column, value in row.items():
        text = visible(text_of(value) or str(value))
        table.add_row(Text(visible(column)), Text(text[:SHOWN] + (" ..." if len(text) > SHOWN else "")))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if prompt is None:
        others = [column for column in row if column != answer]
        prompt = Prompt.ask("Which column has the prompts?", console=console, choices=others)
    if answer is None:
        others = [column for column in row if column != prompt]
        if others:
            answer = Prompt.ask("Which column has the right answers?", console=console, choices=others)
    return prompt, answer


def yaml_of(value: object, indent: str = "") -> str:
    """Return block yaml of mappings; lists and scalars are written as JSON, which quotes all texts."""
    if not isinstance(value, dict):
        # Yaml reads some characters as line breaks, and refuses others.
        text = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
        return f" {text}\n"
    inner = "".join(f"{indent}{key}:{yaml_of(each, indent + '  ')}" for key, each in value.items())
    return f"\n{inner}" if indent else inner


def text_of(prompt: object) -> str:
    """Return the text of a prompt: itself, or the contents of a conversation."""
    if isinstance(prompt, str):
        return prompt
    return "".join(str(message.get("content", "")) for message in prompt) if isinstance(prompt, list) else ""
