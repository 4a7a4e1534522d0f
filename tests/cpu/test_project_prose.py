"""The linter of the documentation's prose: what it finds, what it leaves alone, and that the documentation passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROSE = Path(__file__).parents[2] / "docs" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", PROSE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_follows_the_rules(prose: ModuleType) -> None:
    assert prose.findings(prose.prose_files()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("We utilize it.", ["page.md:1: Write 'use' instead of 'utilize'."]),
        ("# A title\n\nIt is fast, and it\nsimply works.", ["page.md:3: Leave 'simply' out, or say what is meant."]),
        ("| a | b |\n|---|---|\n| c | of course |", ["page.md:3: Leave 'of course' out, or say what is meant."]),
        ("It ends. What runs ends.", ["page.md:1: Begin with the subject, not with a clause: 'What runs ends.'."]),
        ("What is it? What to do is clear. Whatever.", ["page.md:1: Leave 'Whatever' out, or say what is meant."]),
        (
            "word " * 45 + "end.",
            [f"page.md:1: A sentence of more than 45 words: make two of it. ({('word ' * 12)}...)"],
        ),
        ("word " * 44 + "end. " + "word " * 44 + "end.", []),
        (
            "It goes on.\n\nIt went on.",
            [f"page.md:{n}: Write 'continue' instead of '{go} on'." for n, go in ((1, "goes"), (3, "went"))],
        ),
        ("`utilize` and [x](utilize.md) and <utilize>\n\n```\nutilize\n```\n", []),
        ("```\ncode\n```\n\nUtilize it.", ["page.md:5: Write 'use' instead of 'Utilize'."]),
        ("The `data.train_data` of a dataset, `utilize`", ["page.md:1: Write 'data set' instead of 'dataset'."]),
    ],
)
def test_a_broken_rule_is_told_with_its_line(
    prose: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text(text)
    assert prose.findings([Path("page.md")]) == told
