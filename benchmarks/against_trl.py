"""Seconds per optimizer step of TRL's GRPO trainer and of ours: the quickstart's model, prompts and batch.

    python benchmarks/against_trl.py [--steps 60] [--warmup 10] [--rounds 3] [--python PYTHON_WITH_TRL]

uv installs TRL from the package index into a separate environment (``uv run --no-project --with trl==1.16.0 --with
torch==2.13.0``; uv gets ``PIP_FIND_LINKS``, so it finds a CPU build of torch in a folder), or
``--python`` names an interpreter that has it. TRL, our ``sync`` and our ``fully_async`` take turns, so that a machine
that gets slower hits all three.

Equal: the model's initial weights, the prompts and rewards, 16 prompts x 8 samples per step, at most 32 tokens, one
optimizer step per batch, AdamW's numbers, learning rate with warm-up and decay, group-normalised advantages, PPO
clip, mean over tokens, no KL term, float32, two cores. Not equal: TRL samples with ``transformers``' generate, a
fixed batch that ends with its longest response (its method without vLLM), ours with the embedded
engine; TRL has all cores for one process after the other (``--trl-threads``: 1, and with more counts the fastest one
of a round is compared; on a busy machine two threads were 15 times slower than one), ours has a process with one
thread for generation and one for training; random numbers differ, so responses do; ours weighs tokens by the
importance ratio of trainer and engine, TRL does that with vLLM alone. Start-up is left out everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.compose import compose
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.rollout.data.dataset import load_dataset

PACKAGES = ("trl==1.16.0", "torch==2.13.0", "reasoning-gym==0.1.25")
SCRIPT = Path(__file__).with_name("trl_quickstart.py")


@dataclass(frozen=True)
class Step:
    """An optimizer step, or the mean of several."""

    seconds: float
    reward: float
    tokens: float  # per response


Enough = Callable[[Sequence[Step]], bool]


def never(steps: Sequence[Step]) -> bool:
    return False


def mean(steps: Sequence[Step]) -> Step:
    return Step(*(statistics.fmean(values) for values in zip(*map(astuple, steps), strict=True)))


def trl_command(python: str | None) -> list[str]:
    if python is not None:
        return [python]
    packages = [argument for package in PACKAGES for argument in ("--with", package)]
    return ["uv", "run", "--quiet", "--no-project", "--python", "3.11", *packages, "python"]


def run_trl(
    command: Sequence[str], settings: Mapping[str, Any], folder: Path, threads: int, enough: Enough = never
) -> list[Step]:
    """Train with TRL until its last step, or until ``enough`` of the steps so far is true."""
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    environment.pop("PYTHONPATH", None)  # ours
    if "PIP_FIND_LINKS" in environment:
        environment["UV_FIND_LINKS"] = environment["PIP_FIND_LINKS"]
    output = folder / "trl.jsonl"
    return _steps_of(
        [*command, str(SCRIPT), str(path), str(output)], environment, output, lambda row: Step(**row), enough
    )


def run_ours(
    mode: str, settings: Mapping[str, Any], folder: Path, enough: Enough = never, further: Sequence[str] = ()
) -> list[Step]:
    """Train by the real command with ``further`` overrides, as :func:`run_trl` does."""
    with tempfile.TemporaryDirectory(dir=folder) as run:
        command = [sys.executable, "-m", "skyrl_train", "train", settings["recipe"]]
        overrides = [
            f"trainer.mode={mode}",
            f"trainer.max_steps={settings['steps']}",
            f"trainer.policy.model.path={settings['model']}",
            f"trainer.seed={settings['seed']}",
            f"trainer.run_dir={run}/run",
            "trainer.trackers=[]",
            "trainer.ckpt_interval=0",
            *further,
        ]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        rows = Path(run, "run", "metrics.jsonl")

        def to_step(row: Mapping[str, float]) -> Step:
            return Step(row["time/step"], row["reward/mean"], row["generate/response_tokens"])

        return _steps_of([*command, *overrides], environment, rows, to_step, enough)


def _steps_of(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    to_step: Callable[[dict[str, float]], Step],
    enough: Enough,
) -> list[Step]:
    """Run ``command`` until it ends or there are ``enough`` steps. Each line that it writes to ``output`` is one step."""
    output.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
        steps: list[Step] = []
        while not enough(steps):
            ended = process.poll() is not None
            if not ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
            if output.exists():  # a last line that is not complete is read the next time
                lines = output.read_text().split("\n")[:-1]
                steps += [to_step(json.loads(line)) for line in lines[len(steps) :]]
            if ended:
                break
        if process.poll() is None:
            process.terminate()
            process.wait()
        elif process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    return steps


def shared_settings(recipe: str, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of the recipe that both sides use. The model's initial weights and the prompts' order follow from
    ``seed``."""
    config = compose(recipe, [f"trainer.seed={seed}"])
    model = folder / f"model-{Path(recipe).stem}-{seed}"
    build_model_folder(config.trainer.policy.model.build, model, config.trainer.seed)
    optimizer = config.trainer.policy.optimizer_config
    prompts = [
        {"prompt": record.prompt[0]["content"], "row": json.dumps(record.env_extras)}
        for record in load_dataset(config.data, config.environment)
    ]
    return {
        "recipe": recipe,
        "env_class": config.environment.env_class,
        "env_kwargs": config.environment.kwargs,
        "model": str(model),
        "output": str(folder / "trl"),
        "prompts": prompts,
        "steps": steps,
        "seed": config.trainer.seed,
        "groups": config.trainer.policy_mini_batch_size,
        "samples": config.generator.n_samples_per_prompt,
        "max_tokens": config.generator.sampling_params.max_tokens,
        "lr": optimizer.lr,
        "betas": optimizer.adam_betas,
        "warmup_steps": optimizer.num_warmup_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-threads", type=int, nargs="*", default=[1])
    parser.add_argument("--python", help="an interpreter that has TRL; default: uv makes an environment")
    options = parser.parse_args()
    command = trl_command(options.python)
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = shared_settings("quickstart", options.steps, compose("quickstart").trainer.seed, folder)
        print("| round | trainer | step | of TRL's | reward | tokens of a response |")
        print("|---" * 6 + "|", flush=True)
        for number in range(1, options.rounds + 1):
            results = {
                f"TRL, {threads} thread{'s' if threads > 1 else ''}": mean(
                    run_trl(command, settings, folder, threads)[options.warmup :]
                )
                for threads in options.trl_threads
            }
            for mode in ("sync", "fully_async"):
                results[mode] = mean(run_ours(mode, settings, folder)[options.warmup :])
            fastest = min(outcome.seconds for label, outcome in results.items() if label.startswith("TRL"))
            for label, outcome in results.items():
                ratios.setdefault(label, []).append(outcome.seconds / fastest)
                print(
                    f"| {number} | {label} | {outcome.seconds * 1e3:.0f} ms | {outcome.seconds / fastest:.2f} "
                    f"| {outcome.reward:.3f} | {outcome.tokens:.1f} |",
                    flush=True,
                )
    for label, found in ratios.items():
        print(f"| median | {label} | | **{statistics.median(found):.2f}** | | |")


if __name__ == "__main__":
    main()
