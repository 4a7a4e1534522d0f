"""SEMANTICS 4.7 with the real engine and backend: ``S = 0`` is the synchronous trainer, bit for bit."""

from __future__ import annotations

import asyncio
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from recorded import samples_of
from rich.console import Console
from safetensors.torch import load_file

from skyrl_train.build.trainer import build_trainer
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.rollout.data.dataset import load_dataset

STEPS, SAMPLES = 4, 2  # two epochs
SMALL = [
    "trainer.policy_mini_batch_size=2",
    f"trainer.max_steps={STEPS}",
    "trainer.trackers=[]",
    "trainer.samples_per_step=100",
    "trainer.policy.model.build.hidden_size=32",
    "trainer.policy.model.build.num_layers=1",
    "generator.sampling_params.max_tokens=4",
    f"generator.n_samples_per_prompt={SAMPLES}",
    "generator.verify_weights=true",
    "generator.inference_engine.batch_invariant=true",
    "generator.inference_engine.executor=thread",
    "data.generate=4",
]


def train(
    folder: Path, recipe: str, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Trains and returns the rows of metrics and samples without what depends on the clock, and the weights."""
    config = compose(recipe, [*SMALL, f"trainer.run_dir={folder}", *overrides])
    dataset = load_dataset(config.data, config.environment)
    plan = resolve(config, len(dataset))
    with closing(RunFolder(folder, config)) as run_folder:
        reporter = Reporter(config, run_folder, Console(file=StringIO()), plan.total_steps)

        async def go() -> None:
            trainer = await build_trainer(config, plan, dataset, run_folder, reporter)
            await trainer.train()

        asyncio.run(go())
        timed = (
            "time",
            "elapsed_s",
            "latency_s",
            "system/",
            "tokens_per_second",
            "async/idle_fraction",
            "async/in_flight",
            "oldest_in_flight",
            "async/submitted",
            "generated_tokens",
        )
        metrics = [
            {k: v for k, v in row.items() if not any(t in k for t in timed)}
            for row in read_jsonl(run_folder.metrics.path)
        ]
    return (
        metrics,
        samples_of(folder),
        load_file(folder / "policy" / "model.safetensors"),
    )


@pytest.mark.parametrize("recipe", [pytest.param("quickstart", marks=pytest.mark.slow), "guess_number"])
def test_bound_zero_gives_the_same_tokens_rewards_losses_and_weights(tmp_path: Path, recipe: str) -> None:
    bound_zero = ("trainer.fully_async.max_staleness_steps=0", "trainer.fully_async.generate_ahead_steps=0")
    sync = train(tmp_path / "sync", recipe, "trainer.mode=sync")
    asynchronous = train(tmp_path / "async", recipe, "trainer.mode=fully_async", *bound_zero)
    assert len(sync[0]) == STEPS and len(sync[1]) == STEPS * 2 * SAMPLES
    assert asynchronous[0] == sync[0]  # rewards, losses, gradient norms, log-prob mismatch, group indices
    assert asynchronous[1] == sync[1]  # tokens
    assert all(asynchronous[2][name].equal(tensor) for name, tensor in sync[2].items())
    assert any(row["policy/grad_norm"] > 0 for row in sync[0])
    other_seed = train(tmp_path / "seed", recipe, "trainer.mode=sync", "trainer.seed=1")
    assert other_seed[1] != sync[1], "a comparison that cannot fail compares nothing"
