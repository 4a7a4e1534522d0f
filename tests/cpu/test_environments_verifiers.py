"""Environments of the package verifiers: their prompts, their rollouts through the harness, and steps of training."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness_worlds import harness
from scripted import EOS, ScriptedEngine
from test_tutorials import SHORT, blocks

import skyrl_train
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.entrypoints.command_line import main
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.environments.verifiers_adapter import AGENT
from skyrl_train.errors import ConfigError
from skyrl_train.generators.validation import to_samples
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID

pytest.importorskip("verifiers")

FILE = str(Path(__file__).with_name("verifiers_worlds.py"))
WORDS = ['<tool_call>{"name": "compare", "arguments": {"guess": ', "}}</tool_call>"]
TOKENIZER = character_tokenizer("0123456789?+-=!", WORDS)


def tokens(text: str) -> list[int]:
    return [int(TOKENIZER.convert_tokens_to_ids(character)) for character in text]


def factory(**kwargs: Any) -> Any:
    return resolve_environment(EnvironmentConfig(env_class=f"verifiers:{FILE}", kwargs=kwargs))


async def rollouts(records: Sequence[PromptRecord], engine: ScriptedEngine) -> GeneratorOutput:
    async with harness(engine=engine, tokenizer=TOKENIZER, agent=AGENT) as it:
        return await it.generator.generate(
            GeneratorInput(
                prompts=[record.prompt for record in records],
                env_classes=["verifiers"] * len(records),
                env_extras=[record.env_extras for record in records],
                sampling_params=None,
                trajectory_ids=[TrajectoryID("p", index) for index in range(len(records))],
                batch_metadata=BatchMetadata(1, "train", tuple(range(len(records)))),
            )
        )


async def test_an_environment_makes_the_prompts_talks_over_several_turns_and_scores_them() -> None:
    made = factory(kind="multi", digits=5)
    records = made.generate_prompts(4, 7)
    assert records == made.generate_prompts(4, 7) != made.generate_prompts(4, 8)
    assert len({record.uid for record in records}) == 4 and records[0].prompt == [{"role": "user", "content": "?"}]
    assert len(made.generate_prompts(100, 7)) == 5  # all that it has

    answers = [record.env_extras["row"]["answer"] for record in records[:2]]

    def guesses(seen: Sequence[int], seed: int) -> int:
        # The right digit of the first record at each turn.
        return EOS if seen[-1] in tokens("0123456789") else tokens(answers[0])[0]

    output = await rollouts(records[:2], ScriptedEngine(guesses, free_running=True))
    right, wrong = to_samples(output, 2)
    turn = [*tokens(answers[0]), EOS]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert [len(sample.sequences) for sample in (right, wrong)] == [1, 1]
    assert right.sequences[0].response_ids == [*turn, *tokens("!"), *turn, *tokens("!"), *turn]
    assert wrong.sequences[0].response_ids == [*turn, *tokens("+"), *turn, *tokens("+"), *turn]
    assert right.sequences[0].loss_mask == [1, 1, 0, 1, 1, 0, 1, 1]
    metrics = output["rollout_metrics"] or {}
    assert metrics["environment/num_turns"] == 3 and metrics["environment/exact"] == 0.5


async def test_a_conversation_that_outgrows_the_context_is_scored_as_it_is() -> None:
    [record] = factory(kind="multi", digits=1).generate_prompts(1, 7)

    def guesses(seen: Sequence[int], seed: int) -> int:
        return EOS if seen[-1] in tokens("0") else tokens("0")[0]

    # The prompts of the turns have 1, 4 and 7 tokens.
    output = await rollouts([record], ScriptedEngine(guesses, max_model_len=6, free_running=True))
    [sample] = to_samples(output, 1)
    assert sample.sequences[0].response_ids == [*tokens("0"), EOS, *tokens("!"), *tokens("0"), EOS]
    assert sample.reward == 1.0


async def test_a_prompt_may_be_text() -> None:
    [record] = factory(kind="text").generate_prompts(1, 7)
    assert record.prompt == [{"role": "user", "content": "?"}]
    engine = ScriptedEngine(lambda seen, seed: EOS if len(seen) > 1 else tokens("3")[0], free_running=True)
    output = await rollouts([record], engine)
    [sample] = to_samples(output, 1)
    assert sample.sequences[0].prompt_token_ids == tokens("?") and sample.reward == 1.0


async def test_a_rollout_actor_may_load_an_environment_and_signals_stay_the_trainers() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    await asyncio.to_thread(factory, kind="single", digits=9)  # an actor runs rollouts beside its main thread
    factory(kind="single", digits=8)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_file_that_has_changed_since_the_last_run_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "changing_environment.py"
    questions = []
    for question in ("?", "!!"):  # of two lengths, because Python compares time and size of a file with its bytecode
        file.write_text(Path(FILE).read_text().replace('"question": "?"', f'"question": "{question}"'))
        forget_files()  # as each run does
        made = resolve_environment(EnvironmentConfig(env_class=f"verifiers:{file}"))
        questions += [record.prompt[-1]["content"] for record in made.generate_prompts(1, 7)]
    assert questions == ["?", "!!"]


def test_an_environment_that_cannot_be_used_is_an_error_before_the_run() -> None:
    with pytest.raises(ConfigError, match="gives no training set: ValueError: dataset is not set"):
        factory(kind="evaluation").generate_prompts(1, 7)
    with pytest.raises(ConfigError, match="scores the rollouts of a prompt together"):
        factory(kind="group")
    with pytest.raises(ConfigError, match=r"cannot be loaded with environment\.kwargs=.*unexpected keyword"):
        factory(kinds="single")
    with pytest.raises(ConfigError, match="'verifiers:nowhere' cannot be loaded"):
        resolve_environment(EnvironmentConfig(env_class="verifiers:nowhere"))
    with pytest.raises(ConfigError, match=r"generator.name=harness and generator.kwargs.agent=skyrl_train\.environ"):
        resolve(skyrl_train.compose("quickstart", [f"environment.env_class=verifiers:{FILE}"]), 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi", "tool"])
def test_an_environment_trains(kind: str, tmp_path: Path) -> None:
    run = skyrl_train.train(
        str(Path(__file__).parents[2] / "examples" / "async" / "agents" / "guess.yaml"),
        overrides={
            "trainer.max_steps": 3,
            "trainer.policy_mini_batch_size": 2,
            "trainer.trackers": [],
            "trainer.run_dir": str(tmp_path / "run"),
            "generator.n_samples_per_prompt": 3,
            "generator.inference_engine.executor": "thread",
            "generator.inference_engine.max_num_seqs": 8,
            "generator.kwargs.agent": AGENT,
            "environment.env_class": f"verifiers:{FILE}",
            "environment.kwargs": {"kind": kind},
        },
        quiet=True,
    )
    assert run.metrics.index.tolist() == [1, 2, 3]
    for _, row in run.metrics.iterrows():
        assert row["policy/tokens"] > 0 and row["generate/turns"] >= 1 and math.isfinite(row["loss/policy"])
        assert row["async/failed"] == row["async/retries"] == 0
        assert row["environment/length"] >= 1


@pytest.mark.slow
def test_the_environment_of_the_tutorial_trains_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "your_own_task.md"
    Path("parity.py").write_text(next(block for block in blocks(page, "python") if "vf.SingleTurnEnv" in block))
    Path("parity.yaml").write_text(next(block for block in blocks(page, "yaml") if "verifiers:parity.py" in block))
    assert main(["train", "parity.yaml", *SHORT, "trainer.max_steps=3"]) == 0
    metrics = skyrl_train.load_run("runs/parity-1").metrics
    assert metrics["environment/matching"].between(0, 1).all() and metrics["reward/mean"].max() > 0
    assert metrics["async/retries"].sum() == 0, "empty answers of random weights fail no attempt"
