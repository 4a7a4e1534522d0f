"""Short synchronous runs of every recipe, and the part of a run folder that two runs of the same command have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_worlds import NAMES, write_stand_in
from recorded import samples_of

from skyrl_train.rollout.stages.reward import GroupToReward

BUILT_IN = ["quickstart", "guess_number", "sort_digits"]
RECIPES = [*BUILT_IN, *NAMES]
LEARNING = ("loss/", "policy/", "reward/", "critic/", "off_policy/", "group_indices")
TIMED = "per_second"
SHORT = [
    "trainer.policy_mini_batch_size=2",
    "trainer.max_steps=2",
    "trainer.policy.model.build.hidden_size=32",
    "trainer.policy.model.build.num_layers=1",
    "trainer.policy.model.build.intermediate_size=64",
    "generator.sampling_params.max_tokens=4",
    "generator.n_samples_per_prompt=3",
    "data.generate=8",
]
SYNCHRONOUS = ["trainer.mode=sync"]
BOUND_ZERO = [  # the asynchronous trainer as a synchronous one
    "trainer.mode=fully_async",
    "trainer.fully_async.max_staleness_steps=0",
    "trainer.fully_async.generate_ahead_steps=0",
]


def command(recipe: str, folder: Path, *overrides: str) -> list[str]:
    """The arguments of a run in ``folder/run``, whose files come from ``folder``."""
    built_in = recipe in BUILT_IN
    return [
        str(recipe if built_in else write_stand_in(recipe, folder)),
        *(SHORT if built_in else [f"rollout.stages.reward.function={__file__}:even_tokens"]),
        f"trainer.run_dir={folder / 'run'}",
        "trainer.trackers=[]",
        "trainer.samples_per_step=100",
        "generator.inference_engine.batch_invariant=true",
        *overrides,
    ]


def even_tokens(group: GroupToReward) -> list[float]:
    """A reward that random weights get now and then; the recipes' own is almost always 0, and a run of it learns nothing."""
    return [sum(token % 2 == 0 for token in sample.response_ids) / 8 for sample in group.samples]


@dataclass(frozen=True)
class Outcome:
    """What a run has trained: a row per step, a row per sample, and the files of weights."""

    steps: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    weights: dict[str, bytes]


def outcome(folder: Path) -> Outcome:
    """The outcome of the run of :func:`command`."""
    run = folder / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {name: value for name, value in row.items() if name.startswith(LEARNING) and TIMED not in name}
        for row in metrics
    ]
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")}
    return Outcome(steps, samples_of(run), files)


def assert_equal(one: Outcome, other: Outcome) -> None:
    """Bit for bit: losses and rewards, tokens and log-probs, weights."""
    assert len(one.steps) == 2 and len(one.samples) >= 8
    assert any(step["policy/grad_norm"] > 0 for step in one.steps)
    assert one.steps == other.steps
    assert one.samples == other.samples
    assert one.weights.keys() == other.weights.keys()
    assert any("checkpoints/global_step_2" in name for name in one.weights)
    assert [name for name in one.weights if one.weights[name] != other.weights[name]] == []
