"""The example agents: each real SDK speaks to the endpoint, its sessions become training data, and a few steps train."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness_worlds import batch, harness
from recorded import samples_of
from scripted import EOS, ScriptedEngine

from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.command_line import main
from skyrl_train.generators.validation import to_samples
from skyrl_train.models.tiny import character_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "async" / "agents"
SDKS = {
    "guess_with_openai": "openai",
    "guess_with_openai_agents": "agents",
    "guess_with_smolagents": "smolagents",
    "guess_with_anthropic": "anthropic",
}
BUILD = compose(str(FOLDER / "guess.yaml"), []).trainer.policy.model.build
TOKENIZER = character_tokenizer(BUILD.alphabet, BUILD.words)
CALL, END = (TOKENIZER.convert_tokens_to_ids(word) for word in BUILD.words)
NUMBER = 0  # of the first sample of a batch


def test_every_example_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SDKS)


@pytest.mark.parametrize("name", SDKS)
def test_an_example_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(SDKS[name])
    script = FOLDER / f"{name}.py"
    settings = [
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.trackers=[]",
        f"trainer.run_dir={tmp_path / 'run'}",
        "generator.n_samples_per_prompt=3",
        "generator.inference_engine.executor=thread",
        "generator.inference_engine.max_num_seqs=8",
    ]
    monkeypatch.setattr(sys, "argv", [str(script), *settings])
    runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/tokens"] == pytest.approx(row["generate/response_tokens"] * 6) and row["policy/tokens"] > 0
        assert row["async/failed"] == row["async/retries"] == 0
        assert row["generate/turns"] >= 1 and math.isfinite(row["loss/policy"]) and 0 <= row["reward/mean"] <= 1


def test_a_run_with_an_agent_can_be_repeated_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    settings = [
        "trainer.mode=sync",
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.trackers=[]",
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.executor=thread",
        "generator.inference_engine.batch_invariant=true",
        "generator.inference_engine.max_num_seqs=8",
        f"generator.kwargs.agent={FOLDER / 'guess_with_openai.py'}:run",
    ]
    for name in ("first", "second"):
        run = f"trainer.run_dir={tmp_path / name}"
        assert main(["train", str(FOLDER / "guess.yaml"), *settings, run]) == 0
    first, second = tmp_path / "first", tmp_path / "second"
    assert samples_of(first) == samples_of(second) and samples_of(first)
    weights = "policy/model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()


def calls_the_tool(tokens: Sequence[int], seed: int) -> int:
    """A model that calls the tool with the right number, and says "!" after whatever it is told."""
    following = {CALL: number(), number(): END, END: EOS, digit("?"): CALL, digit("!"): EOS}
    return following.get(tokens[-1], digit("!"))


def digit(text: str) -> int:
    return int(TOKENIZER.convert_tokens_to_ids(text))


def number() -> int:
    return digit(str(NUMBER))


@pytest.mark.parametrize("name", ["guess_with_openai_agents", "guess_with_anthropic"])
async def test_a_tool_call_reaches_the_sdk_and_its_result_continues_the_same_tokens(name: str) -> None:
    pytest.importorskip(SDKS[name])
    engine = ScriptedEngine(calls_the_tool, free_running=True)
    async with harness(engine=engine, tokenizer=TOKENIZER, agent=f"{FOLDER / name}.py:run") as it:
        output = await it.generator.generate(batch(1, prompt="?"))
        [sample] = to_samples(output, 1)
        [row] = sample.sequences
        assert sample.reward == 1.0
        assert row.response_ids == [CALL, number(), END, EOS, digit("="), digit("!"), EOS]
        assert row.loss_mask == [1, 1, 1, 1, 0, 1, 1]
        metrics = output["rollout_metrics"] or {}
        assert (metrics["environment/calls"], metrics["generate/turns"], metrics["generate/drifted_turns"]) == (1, 2, 0)


async def test_a_framework_that_retells_the_history_gives_one_sequence_per_step() -> None:
    pytest.importorskip("smolagents")
    engine = ScriptedEngine(calls_the_tool, free_running=True)
    agent = f"{FOLDER / 'guess_with_smolagents'}.py:run"
    async with harness(engine=engine, tokenizer=TOKENIZER, agent=agent) as it:
        output = await it.generator.generate(batch(1, prompt="?"))
        [sample] = to_samples(output, 1)
        assert sample.reward == 1.0
        assert output["is_last_step"] == [False, False, True]
        assert [row.response_ids for row in sample.sequences][:2] == [[CALL, number(), END, EOS], [digit("!"), EOS]]
        assert all(set(row.loss_mask) == {1} for row in sample.sequences)


def blocks(page: str, language: str) -> list[str]:
    text = (FOLDER.parents[2] / "docs" / "tutorials" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("form", ["function", "program"])
def test_the_tutorials_agent_trains_as_written(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    function, _, program = blocks("agent_harness.md", "python")
    Path("agent.py").write_text(function)
    Path("program.py").write_text(program)
    Path("sums.jsonl").write_text(blocks("agent_harness.md", "json")[0])
    Path("agent.yaml").write_text(blocks("agent_harness.md", "yaml")[0])
    commands = [shlex.split(block.replace("\\\n", "")) for block in blocks("agent_harness.md", "bash")]
    words = commands[form == "program"]
    settings = words[words.index("train") + 1 :]
    short = ["trainer.max_steps=1", "trainer.policy_mini_batch_size=1", "generator.n_samples_per_prompt=2"]
    short += ["trainer.trackers=[]", "generator.inference_engine.executor=thread"]
    assert main(["train", *settings, *short]) == 0
    [row] = [json.loads(line) for line in Path("runs/agent-1/metrics.jsonl").read_text().splitlines()]
    assert row["generate/turns"] == 1 and row["async/failed"] == row["async/retries"] == 0
