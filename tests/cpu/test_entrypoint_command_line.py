"""The command line as a whole: its verbs, its help, its exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from skyrl_train.entrypoints.command_line import app, main

ROOT = Path(__file__).parents[2]
VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_help_of_the_command_and_of_each_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from skyrl_train.entrypoints.command_line import main\n"
        "print(main(['--help']), 'pydantic' in sys.modules, file=sys.stderr)\n"
        f"print([main([verb, '-h']) for verb in {VERBS}], file=sys.stderr)\n"  # typer reads a verb's options with pydantic
        "heavy = ('torch', 'hydra', 'numpy', 'transformers', 'uvicorn', 'starlette', 'pandas', 'pyarrow')\n"
        "sys.exit(str([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["0 False", str([0] * len(VERBS)), "[]"]
    assert all(f" {verb} " in done.stdout for verb in VERBS)


def test_the_installed_command_and_the_module_are_the_same() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["skyrl-train"]
    module, _, name = script.partition(":")
    assert (
        getattr(importlib.import_module(module), name) is main is importlib.import_module("skyrl_train.__main__").main
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tarin", "quickstart"], "Did you mean 'train'"),
        (["train"], "recipe"),
        (["train", "quikstart"], "Did you mean quickstart"),
        (["plan", "trainer.seed=1"], "There is no recipe 'trainer.seed=1'"),
        (["try", "quickstart", "-n", "0"], "--samples"),
        (["serve", "x", "--backend", "sglang"], "embedded"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_what_is_wrong(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
