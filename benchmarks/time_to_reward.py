"""Steps and seconds until the mean reward reaches a target: TRL's GRPO trainer and our modes, over several seeds.

    python benchmarks/time_to_reward.py [--recipes NAME_OR_FILE ...] [--modes MODE ...] [--seeds 5]
        [--targets REWARD ...] [--steps N] [--taught-loss L] [--python PYTHON_WITH_TRL | --without-trl] [key=value ...]

The trainers take turns at each seed, with equal initial weights, prompts, rewards, batch, optimizer, learning rate and number of
steps (``against_trl.py`` says what is equal). A run ends when it has reached the last target. TRL trains the recipes whose answer
is one response: all but ``guess_number``. ``spell_backward`` is a task of reasoning-gym. Its runs begin with a model that has
learned a part of the task by supervised updates. Settings (``key=value``) are for our runs only.

A target is reached at the end of the first step at which the mean reward of ``WINDOW`` steps is as high. Seconds are those of the
steps, without start-up. The tables show the median over the seeds, the lowest and the highest value in brackets, and in how many
runs the target was reached. A ratio is the median over the seeds at which both reached it, of the seconds of one run and those of
the other at the same seed: TRL's and each mode's, then ``sync``'s and each mode's. Steps do not depend on how busy the machine is
(but for the asynchronous modes); seconds do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from against_trl import Step, run_ours, run_trl, shared_settings, trl_command
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config.compose import compose

WINDOW = 10  # steps
TARGETS = {"guess_number": (0.3, 0.5, 0.7), "spell_backward": (0.5, 0.6, 0.7)}
OTHER_TARGETS = (0.5, 0.8, 0.9)
MODES = ("sync", "one_step_off", "partial_rollout", "fully_async")
SPELL_BACKWARD = Path(__file__).with_name("spell_backward.yaml")
TAUGHT = "reasoning_gym:"  # from random weights, the first tokens of real words take too long to find
EXAMPLES = 64  # in one update of the supervised training
SEVERAL_TURNS = ("guess_number",)  # TRL's method for single responses does not train them


def reached(steps: Sequence[Step], target: float) -> tuple[int, float] | None:
    """Return the number of steps and of seconds until ``target``; None: not reached."""
    for end in range(WINDOW, len(steps) + 1):
        if statistics.fmean(step.reward for step in steps[end - WINDOW : end]) >= target:
            return end, sum(step.seconds for step in steps[:end])
    return None


def teach(settings: Mapping[str, Any], enough: float) -> None:
    """Train the model folder on answers to the task's prompts, until the mean loss of ``WINDOW`` updates is ``enough``."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    draws = random.Random(settings["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses: list[float] = []
    while len(losses) < WINDOW or statistics.fmean(losses[-WINDOW:]) > enough:
        rows, labels = [], []
        for example in draws.choices(settings["prompts"], k=EXAMPLES):
            prompt = tokenizer(example["prompt"]).input_ids
            answer = [*tokenizer(json.loads(example["row"])["entry"]["answer"]).input_ids, tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))  # the loss leaves the prompt out
        tokens = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        # Padding comes last, and no token attends to later ones.
        loss = model(input_ids=tokens, labels=pad_sequence(labels, batch_first=True, padding_value=-100)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(settings["model"])


def spread(values: Sequence[float], seeds: int) -> str:
    if not values:
        return f"0 of {seeds}"
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}; {len(values)} of {seeds})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "guess_number", str(SPELL_BACKWARD)])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--targets", type=float, nargs="+", help="default: three for each recipe")
    parser.add_argument("--steps", type=int, help="default: those of the recipe")
    parser.add_argument(
        "--taught-loss", type=float, default=0.45, help="of supervised updates on tasks of reasoning-gym"
    )
    parser.add_argument("--python", help="an interpreter that has TRL; default: uv makes an environment")
    parser.add_argument("--without-trl", action="store_true", help="run our modes alone")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    command = trl_command(options.python)
    for recipe in options.recipes:
        targets = options.targets or TARGETS.get(Path(recipe).stem, OTHER_TARGETS)

        def enough(steps: Sequence[Step], last: float = max(targets)) -> bool:
            return reached(steps, last) is not None

        steps = options.steps or compose(recipe).trainer.max_steps
        runs: dict[str, list[list[Step]]] = {}
        with tempfile.TemporaryDirectory() as name:
            for seed in range(1, options.seeds + 1):
                settings = shared_settings(recipe, steps, seed, Path(name))
                if settings["env_class"].startswith(TAUGHT):
                    teach(settings, options.taught_loss)
                results = {}
                if not options.without_trl and recipe not in SEVERAL_TURNS:
                    results["TRL"] = run_trl(command, settings, Path(name), 1, enough)
                for mode in options.modes:
                    results[mode] = run_ours(mode, settings, Path(name), enough, options.overrides)
                for label, result in results.items():
                    runs.setdefault(label, []).append(result)
                    found = [reached(result, target) for target in targets]
                    print(f"{Path(recipe).stem}, seed {seed}, {label}: {found}", file=sys.stderr, flush=True)
        print(f"{Path(recipe).stem}, at most {steps} steps, {options.seeds} seeds\n")
        baselines = [label for label in ("TRL", "sync") if label in runs]
        head = ["reward", "trainer", "steps", "seconds", *(f"{label}'s seconds / own" for label in baselines)]
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for target in targets:
            found = {label: [reached(run, target) for run in of_label] for label, of_label in runs.items()}
            for label, ends in found.items():
                cells = [spread([end[place] for end in ends if end], options.seeds) for place in (0, 1)]
                for baseline in baselines:
                    ratios = [a[1] / b[1] for a, b in zip(found[baseline], ends, strict=True) if a and b]
                    cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
                print(f"| {target} | {label} | {' | '.join(cells)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
