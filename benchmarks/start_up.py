"""Seconds from a command to its first output, and to the first sampled token, beside a bare ``import torch, transformers``.

    python benchmarks/start_up.py [--rounds 5] [--commands help plan train] [key=value ...]

Each round starts all of them in turns, each in a new process:

    import    ``import torch, transformers``, and the names that a model needs
    help      ``skyrl-train --help``
    plan      ``skyrl-train plan quickstart``
    train     one step of the quickstart

Printed: medians over the rounds of the wall time, of its ratio to the imports in the same round, and of the processor time of
the whole command (its engine's process included); then the wall time of each phase until the first tokens arrive. Bytecode is
written, as Python does by default.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTS = "import torch, transformers; from transformers import AutoModelForCausalLM, AutoTokenizer"
LABELS = {
    "import": "`import torch, transformers`, and two names of it",
    "help": "`skyrl-train --help`",
    "plan": "`skyrl-train plan quickstart`",
    "train": "the quickstart, until the first token",
}
PHASES = (
    "the command's own imports",
    "configuration, data and plan",
    "libraries (the engine's process has them too)",
    "model, engine and trainer",
    "first weight sync and tokens",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", nargs="+", choices=["help", "plan", "train"], default=["help", "plan", "train"])
    parser.add_argument("overrides", nargs="*", help="settings of the quickstart")
    options = parser.parse_intermixed_args()
    names = ["import", *options.commands]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    phases = []
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "import": ["-c", IMPORTS],
            "help": ["-m", "skyrl_train", "--help"],
            "plan": ["-m", "skyrl_train", "plan", "quickstart", *options.overrides],
            "train": [__file__, "train", "trainer.max_steps=1", f"trainer.runs_dir={folder}", *options.overrides],
        }
        for _ in range(options.rounds):
            for name in names:
                marks = Path(folder, "marks.json")
                found[name].append(measured([sys.executable, *commands[name]], marks))
                if name == "train":
                    phases.append(json.loads(marks.read_text()))
                    found[name][-1] = (phases[-1][-1], found[name][-1][1])  # until the first token, not until the end
    bare = [wall for wall, _ in found["import"]]
    print("| command | wall | of the imports | processor |\n|---|---|---|---|")
    for name in names:
        walls, processor = zip(*found[name], strict=True)
        ratio = statistics.median(wall / other for wall, other in zip(walls, bare, strict=True))
        told = LABELS[name]
        print(f"| {told} | {statistics.median(walls):.2f} s | {ratio:.2f} | {statistics.median(processor):.1f} s |")
    if phases:
        print("\n| the start of the quickstart | wall |\n|---|---|")
        ends = [statistics.median(column) for column in zip(*phases, strict=True)]
        for phase, start, end in zip(PHASES, [0.0, *ends], ends, strict=False):
            print(f"| {phase} | {end - start:.2f} s |")


def measured(command: list[str], marks: Path) -> tuple[float, float]:
    """Run a command; return its seconds of wall time and of processor time, those of its children included."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    environment |= {"START_UP_MARKS": str(marks), "START_UP_BEGAN": repr(start)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.time() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(arguments: list[str]) -> int:
    """Train, in this process, and write down when each phase ended: seconds since the process was asked for."""
    began, ends = float(os.environ["START_UP_BEGAN"]), [0.0] * len(PHASES)

    def ended(phase: int) -> None:
        ends[phase] = ends[phase] or time.time() - began

    def then(function: Callable[..., Any], phase: int) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            value = function(*arguments, **options)
            ended(phase)
            return value

        return wrapped

    def after(function: Callable[..., Any], phase: int) -> Callable[..., Any]:
        async def wrapped(*arguments: Any, **options: Any) -> Any:
            value = await function(*arguments, **options)
            ended(phase)
            return value

        return wrapped

    from skyrl_train.entrypoints import run
    from skyrl_train.entrypoints import train as command
    from skyrl_train.entrypoints.command_line import main

    ended(0)
    command.load_inputs = then(command.load_inputs, 1)
    original = run._train

    async def with_libraries(*arguments: Any) -> Any:
        ended(2)
        from skyrl_train.build import trainer
        from skyrl_train.inference.client import InferenceEngineClient

        trainer.build_trainer = after(trainer.build_trainer, 3)
        InferenceEngineClient._run_segment = after(InferenceEngineClient._run_segment, 4)  # type: ignore[method-assign]
        return await original(*arguments)

    run._train = with_libraries
    code = main(["train", "quickstart", *arguments])
    Path(os.environ["START_UP_MARKS"]).write_text(json.dumps(ends))
    return code


if __name__ == "__main__":
    sys.exit(train(sys.argv[2:]) if sys.argv[1:2] == ["train"] else main())
