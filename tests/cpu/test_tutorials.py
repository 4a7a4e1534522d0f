"""What the tutorials show, run as it stands there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

from skyrl_train.config.compose import compose, recipe_names
from skyrl_train.entrypoints.command_line import app, main
from skyrl_train.entrypoints.sweep import split
from skyrl_train.rollout.staleness.policies import StalenessView, resolve_staleness_policy

DOCS = Path(__file__).parents[2] / "docs" / "tutorials"
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SHORT = ["trainer.max_steps=2", "trainer.trackers=[]", "generator.inference_engine.executor=thread"]


def blocks(page: str, language: str) -> list[str]:
    """Return the code of a tutorial, or of the README as ``../../README.md``."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_page_about_your_own_task_trains_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in blocks("your_own_task.md", "json")[0].splitlines()]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("sums.py").write_text(next(block for block in blocks("your_own_task.md", "python") if "class Sums" in block))
    Path("sums.yaml").write_text(blocks("your_own_task.md", "yaml")[0])
    assert main(["train", "sums.yaml", *SHORT]) == 0
    assert (tmp_path / "runs" / "sums-1" / "policy" / "model.safetensors").is_file()
    rewarding = next(block for block in blocks("your_own_task.md", "python") if "def reward" in block)
    Path("sums_reward.py").write_text(rewarding)
    (command,) = (block for block in blocks("your_own_task.md", "bash") if "sums_reward.py" in block)
    assert main(["try", *command.split()[4:], *SHORT]) == 0
    Path("trl_reward.py").write_text(
        next(block for block in blocks("your_own_task.md", "python") if "trl_reward" in block)
    )
    function = ["environment.env_class=single_turn", "rollout.stages.reward.function=trl_reward.py:trl_reward"]
    assert main(["try", "sums.yaml", *function, *SHORT]) == 0
    Path("calculator.py").write_text(
        next(block for block in blocks("your_own_task.md", "python") if "class Calculator" in block)
    )
    (command,) = (block for block in blocks("your_own_task.md", "bash") if "calculator.py" in block)
    assert main(["try", *shlex.split(command.replace("\\\n", ""))[4:], *SHORT]) == 0
    script = next(block for block in blocks("your_own_task.md", "python") if "dataset=rows" in block)
    shortened = script.replace("settings = {", 'settings = {"trainer.max_steps": 2, ')
    exec(compile(shortened, "rows.py", "exec"), names := {"__name__": "rows"})
    assert names["run"].summary.steps == 2


def test_the_page_about_generators_of_your_own_trains_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_generator.py").write_text(blocks("custom_generator.md", "python")[0])
    assert main(["train", "quickstart", "generator.name=my_generator.py:MyGenerator", *SHORT]) == 0
    assert len(Path("runs/quickstart-1/metrics.jsonl").read_text().splitlines()) == 2


def test_the_staleness_policy_of_the_page_about_asynchronous_training_drops_what_is_twice_as_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (block for block in blocks("fully_async.md", "python") if "MaskThenDrop" in block)
    Path("mask_then_drop.py").write_text(script)
    setting = "trainer.fully_async.staleness_policy=mask_then_drop.py:MaskThenDrop"
    assert main(["train", "quickstart", setting, *SHORT]) == 0
    policy = resolve_staleness_policy("mask_then_drop.py:MaskThenDrop")
    view = StalenessView(step=10, batch_groups=1, slots=1, max_staleness_steps=2, running={}, finished={})
    assert [policy.evict(view, version) for version in (4, 5)] == [True, False]
    assert policy.oldest_trained_version(10, 2) == 7


def test_the_page_about_updates_in_flight_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = blocks("in_flight_updates.md", "python")
    exec(compile(script, "in_flight.py", "exec"), {"__name__": "__main__"})
    seen = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    versions = {
        mode: json.loads(re.sub(r"(\d+):", r'"\1":', re.search(r"\{.*\}", text)[0])) for mode, text in seen.items()
    }
    assert set(versions) == {"keep", "recompute", "abort", "wait"}
    assert all(sum(counts.values()) == 200 for counts in versions.values())
    assert {mode: len(counts) for mode, counts in versions.items()} == {
        "keep": 2,
        "recompute": 2,
        "abort": 2,
        "wait": 1,
    }
    assert {mode: int(re.search(r"(\d+) engine", text)[1]) for mode, text in seen.items()} == {
        "keep": 1,
        "recompute": 1,
        "abort": 2,
        "wait": 1,
    }


def test_the_readmes_reward_trains_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = [block for block in blocks("../../README.md", "python") if "def reward" in block]
    assert "reward_fn=reward)" in script
    Path("script.py").write_text(script.replace("reward_fn=reward)", f"reward_fn=reward, overrides={SHORT})"))
    run = runpy.run_path("script.py")["run"]
    for sample in run.samples.itertuples():
        text = re.sub(r"<\w+>", "", sample.response)  # the reward sees it without special tokens
        assert sample.reward == pytest.approx(text.count("c") / max(1, len(text)))


def test_the_readmes_agent_is_tried_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    (script,) = [block for block in blocks("../../README.md", "python") if "def run" in block]
    Path("agent.py").write_text(script)
    commands = "".join(blocks("../../README.md", "bash"))
    (words,) = re.findall(r"skyrl-train (try quickstart .*agent=agent\.py:run)\n", commands)
    assert main([*words.split(), "--samples", "2", "generator.inference_engine.executor=thread"]) == 0
    assert "sample 2 of 2: reward " in capsys.readouterr().out


@pytest.mark.parametrize("page", ["../../README.md", *sorted(path.name for path in DOCS.glob("*.md"))])
def test_every_command_of_a_page_has_a_verb_options_a_recipe_and_settings_that_exist(page: str) -> None:
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    for verb, rest in re.findall(r"skyrl-train ([a-z]+)([^#\n]*)", text):
        words = shlex.split(rest)
        options = {option for parameter in VERBS[verb].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= {*options, "--help"}
        if verb not in ("doctor", "plan", "try", "train", "sweep", "eval") or not words:
            continue
        name = words[words.index("--recipe") + 1] if "--recipe" in words else words[0]
        fixed, swept = split([word for word in words if "=" in word and not word.startswith("-")])
        assert (verb == "sweep") == bool(swept)
        # A file of the page, or a run, has settings of the same schema.
        recipe = name if name in recipe_names() else "base"
        assert recipe == name or name.endswith(".yaml") or verb == "eval"
        compose(recipe, [*fixed, *(f"{key}={value}" for key, values in swept.items() for value in values)])


def anchor(heading: str) -> str:
    """What a link to a heading has behind its ``#``."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_between_pages_leads_somewhere() -> None:
    root = DOCS.parents[1]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md")]
    for page in pages:
        for target, _, place in (
            link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)", page.read_text())
        ):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} links to {target}"
            if place:
                headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
                assert place in map(anchor, headings), f"{page.name} links to {target}#{place}"
